"""Writes docs/benchmarks.md from the runs in docs/benchmarks/."""
