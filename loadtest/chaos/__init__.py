"""Faults at random moments while streams run."""
