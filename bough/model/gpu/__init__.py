"""Triton kernels, and errors and settings of GPUs. Triton is imported when a kernel is first asked for."""
