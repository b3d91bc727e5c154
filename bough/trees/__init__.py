"""Draft trees: their arrays, growth plans, optimal shapes, acceptance estimates, and prompt lookup."""
