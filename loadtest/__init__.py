"""Benchmarks, a package for each subject: `python -m loadtest.PACKAGE` ends with one JSON line. No test needs them."""

import bough.model  # noqa: F401  # before torch, see there
