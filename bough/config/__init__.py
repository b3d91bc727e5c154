"""Settings of the processes: what they may be, and how they are read from flags and environment."""
