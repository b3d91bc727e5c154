"""What a draft model is worth, and what its steps cost."""
