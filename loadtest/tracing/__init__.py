"""`python -m loadtest.tracing` measures the cost of tracing in latency and processor time."""
