"""Compares bough with other programs that run the same weights."""
