"""Sends malformed messages to everything that decodes: both APIs, the workers' services and the index."""
