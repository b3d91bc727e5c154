"""Benchmarks, a room for each subject: `python -m loadtest.ROOM` ends with one JSON line. None decides a test."""

import bough.model  # noqa: F401  # before torch, see there
