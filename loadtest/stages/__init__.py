"""Measures and disturbs a target whose layers two hosts hold together."""
