"""The main loop: drafting, verifying, and going on where a worker has failed."""
