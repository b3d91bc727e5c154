"""A model with its weights in memory, run on batches, on a CPU or a GPU."""
