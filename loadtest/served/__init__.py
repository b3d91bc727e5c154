"""`python -m loadtest.served`: overload, restarts, and a soak test."""
