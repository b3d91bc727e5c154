"""Measures tokens per round by scheme, growth and tree size, and acceptance by scheme; it measures no times."""
