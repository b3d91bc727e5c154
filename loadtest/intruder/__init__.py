"""Tries to get in where it should not, by every way in, and counts what was not refused."""
