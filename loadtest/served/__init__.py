"""`python -m loadtest.served`: overhead of each API, capacity in streams, overload, restarts, and a soak test."""
