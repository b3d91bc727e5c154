"""The draft worker: grows trees of guesses with a small model."""
