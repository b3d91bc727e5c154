"""Benchmarks: each ends with one JSON line; none decides a test."""

import bough.model  # noqa: F401  # before torch, see there
