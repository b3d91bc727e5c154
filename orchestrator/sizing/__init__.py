"""Decides how large trees are: the sizers, what they learn from, and the log of their decisions."""
