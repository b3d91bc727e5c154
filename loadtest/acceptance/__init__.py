"""Tokens per round by scheme, growth and tree size, and what each scheme accepts; no timing."""
