"""Keys of applications and workers, TLS, and where processes may listen without these."""
