"""Sweeps of a target: beside the link, the processor, peers, and what a plan says."""
