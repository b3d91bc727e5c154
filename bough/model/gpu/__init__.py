"""Triton kernels of `bough.model.backends.triton`, which imports them when one is first used."""
