"""Writes docs/benchmarks.md from the runs that stand in docs/benchmarks/."""
