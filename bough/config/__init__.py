"""Settings of each process, and how they are read from flags and environment variables."""
