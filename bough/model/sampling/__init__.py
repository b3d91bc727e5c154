"""Which token follows from logits: the target's choice, and a draft's guesses."""
