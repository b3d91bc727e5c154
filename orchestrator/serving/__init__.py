"""Requests from admission to release, for all APIs."""
