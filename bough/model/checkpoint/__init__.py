"""Checkpoints on disk: where each tensor is, files written beside them, and the Hugging Face cache."""
