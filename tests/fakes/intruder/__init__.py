"""Attempts unauthorised access by every API, and counts what was not refused."""
