"""Compares self-sized trees with the best fixed size, on simulated and on real workers."""
