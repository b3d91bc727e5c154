"""Llama-like decoders on a CPU, compiled layer by layer from the kernels of `bough.model.cpu`."""
