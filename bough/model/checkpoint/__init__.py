"""Checkpoints on disk: where each tensor stands, what is written beside it, and where folders come from."""
