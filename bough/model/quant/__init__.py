"""Quantized weights in 4 or 8 bits: formats of bough, GPTQ, AWQ, compressed-tensors and FP8 checkpoints."""
