"""`python -m loadtest.served`: what doors cost, how many streams are carried, overload, restarts, a soak."""
