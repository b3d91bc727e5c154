"""Measures the acceptance of a draft model and the cost of its steps."""
