"""Requests from admission to release, for all front doors."""
