"""Measures the start of `bough up` and the memory of its processes."""
