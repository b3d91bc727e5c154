"""Experts of a mixture, brought when rows choose them."""
