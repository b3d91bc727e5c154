"""Opens sessions for requests, and cleans up after them."""
