"""Weights in 4 or 8 bits: bough's format, GPTQ's and AWQ's."""
