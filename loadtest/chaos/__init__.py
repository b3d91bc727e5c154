"""Injects faults at random moments while streams run."""
