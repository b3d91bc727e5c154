"""What several benchmarks use: prompts, limits on a process, ratios with intervals, small models."""
