"""Which calls go into the next sweep, and the thread that runs it."""
