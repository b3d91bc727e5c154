"""Checkpoints on disk: places of tensors, files written next to them, and the Hugging Face cache."""
