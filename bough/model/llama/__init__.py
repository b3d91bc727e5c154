"""Llama-like decoders on a CPU, compiled from the kernels of `bough.model.cpu`."""
