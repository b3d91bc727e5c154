"""Machine code is made once for all that a function calls, and for no function that only compiled ones call."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numba.core.caching import NullCache
from numba.core.codegen import JITCPUCodegen
from numba.core.registry import cpu_target

from bough.model.cpu import jit, late_code


@jit.strict_inner
def _doubled(number):
    return 2 * number


@jit.strict_inner
def _added(number, others):
    return _doubled(number) + np.zeros(others).sum()


@jit.strict
def both(number):
    return _doubled(number) + _added(number, 3)


def have_code(function: Any) -> set[bool]:
    """Whether a function has machine code, for arguments of any types that it was compiled for."""
    return {compiled.library._has_code for compiled in function.overloads.values()}


def test_what_only_compiled_code_calls_has_no_code_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(both, "_cache", NullCache())  # code loaded from disk would not compile what it calls
    assert both(2.0) == 8.0
    assert [have_code(function) for function in (both, _doubled, _added)] == [{True}, {False}, {False}]


def test_python_runs_it_as_its_own() -> None:
    """numba's own class would have ended the process."""
    assert _added(2.0, 3) == 4.0


def test_other_versions_of_numba_compile_in_their_own_way(monkeypatch: pytest.MonkeyPatch) -> None:
    codegen = cpu_target.target_context.codegen()
    monkeypatch.setattr(codegen, "__class__", JITCPUCodegen)
    monkeypatch.setattr(late_code, "TRIED_VERSION", (0, 0))
    late_code.make_code_late()
    assert type(codegen) is JITCPUCodegen
