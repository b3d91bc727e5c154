"""Compares a target's sweeps with the link, the processor, and another commit's bits."""
