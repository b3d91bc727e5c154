"""Runs models with weights in memory on batches, on a CPU or a GPU."""
