"""Flags that commands share, or that take a file of their own."""
