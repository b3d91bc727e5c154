"""Kernels for CPUs: products and attention, compiled by numba. Frozen: nothing is tuned here any more."""
