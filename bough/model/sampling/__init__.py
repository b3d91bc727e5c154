"""Sampling from logits: the target's tokens, and a draft's guesses."""
