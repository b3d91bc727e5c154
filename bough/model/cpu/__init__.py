"""Kernels for CPUs: matrix products and attention, compiled by numba. They are not tuned any further."""
