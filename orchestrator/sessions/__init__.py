"""State of a running request: tokens, text and deadline."""
