"""Slots of keys and values: whose they are, and where they are."""
