"""Moves weights to where they are used: from disk to host memory, and from host memory to a device."""
