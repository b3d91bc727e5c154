"""Sizes of models, speed of the hardware, and division of memory."""
