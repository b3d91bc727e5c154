"""`python -m loadtest.tracing`: what traces cost, in time and in processor time."""
