"""Malformed messages by the million against everything that decodes: both doors, workers' services, the index."""
