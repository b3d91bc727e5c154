"""The settings with which functions are compiled that a draft step takes beside the model, or that they are not."""

from __future__ import annotations

from typing import Any

_is_interpreted = False


def interpret() -> None:
    """From now on `compiled` leaves functions as they are: for a process that has no model and must start soon."""
    global _is_interpreted
    _is_interpreted = True


def compiled(function: Any) -> Any:
    """The function as compiled code that is kept for the next start; loads numba.

    "fastmath" is said: where it is not, numba takes it over from whichever function is compiled first of those that
    call (`bough.model.cpu.gemm`).
    """
    if _is_interpreted:
        return function
    import numba

    return numba.njit(fastmath=False, cache=True, error_model="numpy", nogil=True)(function)
