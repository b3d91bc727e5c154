"""Compares a target's sweeps with the link, the processor, peers, and plans."""
