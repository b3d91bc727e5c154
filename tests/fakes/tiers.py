"""What of a grid of cases is in the suite, and what in `make test-long`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def long_but(kept: Iterable[Any], cases: Iterable[Any]) -> list[Any]:
    """Values for `pytest.mark.parametrize`: all `cases`, of which those that are not `kept` are marked `long`."""
    kept, cases = list(kept), list(cases)
    assert all(case in cases for case in kept), "a case of the suite is not in the grid"
    return [case if case in kept else _long(case) for case in cases]


def _long(case: Any) -> Any:
    values = case if type(case) is tuple else (case,)  # a named tuple is one value
    return pytest.param(*values, marks=pytest.mark.long)
