"""Sizing trees: what sweeps and draft steps cost, what guesses are worth, and which size follows. Imports no torch."""
