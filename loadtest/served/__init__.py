"""`python -m loadtest.served`: restarts, and a soak test."""
