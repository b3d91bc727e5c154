"""Checks of the GPU path: exactness, memory limits, and speed relative to the link."""
