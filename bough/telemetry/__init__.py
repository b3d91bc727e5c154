"""Metrics, traces and logs of all processes."""
