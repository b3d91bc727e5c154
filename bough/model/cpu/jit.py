"""The settings with which functions are compiled by numba: no other file calls `numba.njit`.

`strict` functions round exactly as written, so sums keep their order; `fastmath_` ones may reorder sums. Every
function must state one of the two: otherwise numba takes the setting of whichever caller is compiled first, and sums
whose order matters may be reordered.
"""

from __future__ import annotations

from typing import Any

import numba

from bough.model.cpu.late_code import Inner, make_code_late

make_code_late()
FASTMATH = {"reassoc", "contract", "nsz", "arcp"}  # without "nnan" and "ninf": NaN and infinities stay valid


def compiler_setting(name: str) -> Any:
    """The value of a numba setting such as NUMBA_NUM_THREADS; None if it is not set."""
    return getattr(numba.config, name)


def strict(function: Any) -> Any:
    """Compile a function with strict rounding; the code is cached on disk."""
    return _njit(function, cache=True, fastmath=False)


def strict_parallel(function: Any) -> Any:
    """Compile a function with strict rounding, whose `numba.prange` runs over threads."""
    return _njit(function, cache=True, fastmath=False, parallel=True)


def strict_inline(function: Any) -> Any:
    """Inline a function of a few operations on numbers into its callers, compiled with strict rounding."""
    return _njit(function, cache=True, fastmath=False, inline="always")


def strict_inner(function: Any) -> Any:
    """Compile a function, with strict rounding, for compiled callers: without the slow-to-compile Python wrapper."""
    return _inner(function, fastmath=False)


def fastmath_parallel(function: Any) -> Any:
    """Compile a function with `numba.prange` whose sums LLVM may reorder, always in the same order on one processor."""
    return _njit(function, cache=True, fastmath=FASTMATH, parallel=True)


def fastmath_inner(function: Any) -> Any:
    """Compile a function for compiled callers; LLVM may reorder its sums, always in the same order on one processor."""
    return _inner(function, fastmath=FASTMATH)


def _inner(function: Any, **options: Any) -> Any:
    inner = _njit(function, no_cpython_wrapper=True, **options)
    inner.__class__ = Inner
    return inner


def _njit(function: Any, **options: Any) -> Any:
    settings: dict[str, Any] = {"error_model": "numpy", "nogil": True, "no_cfunc_wrapper": True}
    return numba.njit(**settings, **options)(function)


def pointer(function: Any, *arguments: Any) -> Any:
    """A pointer to a function compiled for arguments of these types, to be passed to compiled functions that call it.

    A function that is called by name is compiled again into each caller, three times into a parallel loop; one that
    is called by pointer is compiled once. It must return nothing.
    """
    options = {name: function.targetoptions[name] for name in ("fastmath", "error_model", "nogil")}
    signature = numba.types.void(*map(numba.typeof, arguments))
    return numba.cfunc(signature, cache=True, **options)(function.py_func)
