"""Plots as text and as PNG."""
