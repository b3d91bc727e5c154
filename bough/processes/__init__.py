"""Processes of bough: the life of one; starting, supervising and ending all of a machine; compatibility checks."""
