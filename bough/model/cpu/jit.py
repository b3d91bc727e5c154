"""The only settings with which functions are compiled by numba here: no other file calls `numba.njit`.

`strict` functions round as they are written, so that sums keep their order; those with `fastmath` may be added up in
another. All say which of the two they are: where one did not, numba took it over from whichever function was compiled
first of those that call it, and sums whose order must not change were put in another. numba is loaded with the first
function, and never in a process that calls `interpret`.
"""

from __future__ import annotations

from typing import Any

FASTMATH = {"reassoc", "contract", "nsz", "arcp"}  # infinities and NaN keep their meaning

_is_interpreted = False


def interpret() -> None:
    """From now on decorators leave functions as they are: for a process that has no model and must start soon."""
    global _is_interpreted
    _is_interpreted = True


def compiler_setting(name: str) -> Any:
    """numba's own setting of this name, such as NUMBA_NUM_THREADS; None where it has its default."""
    from numba import config

    return getattr(config, name)


def strict(function: Any) -> Any:
    """Compiled code that rounds as it is written, and is kept for the next start."""
    return _compiled(function, fastmath=False)


def strict_parallel(function: Any) -> Any:
    """The same, with `numba.prange` over threads."""
    return _compiled(function, fastmath=False, parallel=True)


def strict_inline(function: Any) -> Any:
    """The same, written into each function that calls it before that is compiled: for a few operations on numbers."""
    return _compiled(function, fastmath=False, inline="always")


def strict_inner(function: Any) -> Any:
    """The same, for a function that only compiled ones call: without what lets Python call it, which takes longest."""
    return _inner(function, fastmath=False)


def fastmath(function: Any) -> Any:
    """Compiled code in which LLVM may add up numbers in any order, always the same for one processor."""
    return _compiled(function, fastmath=FASTMATH)


def fastmath_parallel(function: Any) -> Any:
    """The same, with `numba.prange` over threads."""
    return _compiled(function, fastmath=FASTMATH, parallel=True)


def fastmath_inner(function: Any) -> Any:
    """The same, for a function that only compiled ones call."""
    return _inner(function, fastmath=FASTMATH)


def _compiled(function: Any, **options: Any) -> Any:
    return function if _is_interpreted else _njit(function, cache=True, **options)


def _inner(function: Any, **options: Any) -> Any:
    if _is_interpreted:
        return function
    from bough.model.cpu.late_code import Inner

    inner = _njit(function, no_cpython_wrapper=True, **options)
    inner.__class__ = Inner
    return inner


def _njit(function: Any, **options: Any) -> Any:
    import numba

    from bough.model.cpu.late_code import make_code_late

    make_code_late()
    settings: dict[str, Any] = {"error_model": "numpy", "nogil": True, "no_cfunc_wrapper": True}
    return numba.njit(**settings, **options)(function)


def pointer(function: Any, *arguments: Any) -> Any:
    """One of these functions, for arguments of these types, as an argument of compiled functions that call it.

    What a compiled function calls by name is compiled into it once more, and three times into a parallel loop. What
    it calls by a pointer is compiled once. Such a function returns nothing.
    """
    import numba

    options = {name: function.targetoptions[name] for name in ("fastmath", "error_model", "nogil")}
    signature = numba.types.void(*map(numba.typeof, arguments))
    return numba.cfunc(signature, cache=True, **options)(function.py_func)
