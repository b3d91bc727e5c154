"""What a second of a target is worth: the tokens that all its sessions get in one."""

from __future__ import annotations

from dataclasses import dataclass, fields

from bough.sizing.division import Price

HALF_LIFE = 20  # sweeps
IDLE = 3.0  # times a sweep, from the end of the last to that of this one, beyond which there was nothing to do


@dataclass(slots=True)
class _Sums:
    """Of what was seen, the later the more."""

    tokens: float = 0.0
    seconds: float = 0.0
    gaps: float = 0.0  # of these, seconds between sweeps
    sweeps: float = 0.0
    brought: float = 0.0  # tokens, of trees of which something was expected
    expected: float = 0.0

    def faded(self) -> _Sums:
        """A sweep later."""
        return _Sums(*(0.5 ** (1 / HALF_LIFE) * getattr(self, field.name) for field in fields(self)))


class TokenPrice:
    """Tokens over seconds, sums of both that fade: a mean of ratios would be ruled by short sweeps.

    Seconds go from the end of one sweep to that of the next, so that what lies between sweeps counts too. What nodes
    were expected to bring is compared with what they have: by that, tokens are told in the draft's own measure.
    """

    def __init__(self) -> None:
        self._sums = _Sums()
        self._last_end: float | None = None

    def answered(self, num_tokens: int, num_expected: float) -> None:
        """In this sweep a session got so many tokens; 0 were expected where it is not known how many."""
        self._sums.tokens += num_tokens
        if num_expected > 0:
            self._sums.brought += num_tokens
            self._sums.expected += num_expected

    def swept(self, sweep_seconds: float, now: float) -> None:
        """A sweep has ended, of which all are answered."""
        passed = now - self._last_end if self._last_end is not None else sweep_seconds
        self._last_end = now
        gap = max(0.0, passed - sweep_seconds) if passed <= IDLE * sweep_seconds else 0.0
        self._sums.seconds += sweep_seconds + gap
        self._sums.gaps += gap
        self._sums.sweeps += 1
        self._sums = self._sums.faded()

    @property
    def tokens_per_second(self) -> float:
        """0 before the first sweep."""
        return self._sums.tokens / self._sums.seconds if self._sums.seconds else 0.0

    @property
    def price(self) -> Price:
        """For dividing a sweep among trees whose nodes are valued as the draft does."""
        sums = self._sums
        measure = sums.expected / sums.brought if sums.brought else 1.0
        return Price(self.tokens_per_second * measure, sums.gaps / sums.sweeps if sums.sweeps else 0.0)
