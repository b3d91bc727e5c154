"""What a second of a target is worth: the tokens that all its sessions get in one."""

from __future__ import annotations

HALF_LIFE = 20  # sweeps
IDLE = 3.0  # times a sweep, from the end of the last to that of this one, beyond which there was nothing to do


class TokenPrice:
    """Tokens over seconds, sums of both that fade: a mean of ratios would be ruled by short sweeps.

    Seconds go from the end of one sweep to that of the next, so that what lies between sweeps counts too.
    """

    def __init__(self) -> None:
        self._tokens = self._seconds = 0.0
        self._last_end: float | None = None

    def swept(self, num_tokens: int, sweep_seconds: float, now: float) -> None:
        """A sweep has ended, by which sessions have so many tokens more."""
        passed = now - self._last_end if self._last_end is not None else sweep_seconds
        self._last_end = now
        fade = 0.5 ** (1 / HALF_LIFE)
        self._tokens = fade * self._tokens + num_tokens
        self._seconds = fade * self._seconds + (passed if passed <= IDLE * sweep_seconds else sweep_seconds)

    @property
    def tokens_per_second(self) -> float:
        """0 before the first sweep."""
        return self._tokens / self._seconds if self._seconds else 0.0
