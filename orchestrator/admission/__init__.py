"""Which requests come in, and how many at once."""
