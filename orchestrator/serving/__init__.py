"""Requests from admission to release, whichever door they came in by."""
