"""bough: trees of guesses from a small model, verified by a large one that streams through the accelerator."""

__version__ = "0.1.0"
