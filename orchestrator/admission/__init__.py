"""Admission: which requests are accepted, and how many run at once."""
