"""The value of a second of a target: the tokens that all its sessions get in one."""

from __future__ import annotations

from dataclasses import dataclass, fields

from bough.sizing.division import Price

HALF_LIFE = 20  # sweeps
IDLE = 3.0  # multiples of a sweep's time; longer gaps between the ends of sweeps mean that there was nothing to do


@dataclass(slots=True)
class _Sums:
    """Exponentially decayed sums."""

    tokens: float = 0.0
    seconds: float = 0.0
    gaps: float = 0.0  # part of `seconds` between sweeps
    sweeps: float = 0.0
    brought: float = 0.0  # tokens gained from trees with an expected value
    expected: float = 0.0  # tokens expected from these trees

    def faded(self) -> _Sums:
        """The sums one sweep later."""
        return _Sums(*(0.5 ** (1 / HALF_LIFE) * getattr(self, field.name) for field in fields(self)))


class TokenPrice:
    """Ratio of decayed sums of tokens and seconds; a mean of ratios would be dominated by short sweeps.

    Seconds are counted from the end of one sweep to the end of the next, including gaps. The ratio of expected to
    gained tokens converts the price to the senders' estimates of tokens.
    """

    def __init__(self) -> None:
        self._sums = _Sums()
        self._last_end: float | None = None

    def answered(self, num_tokens: int, num_expected: float) -> None:
        """Record a session's answer; `num_expected` is 0 if unknown."""
        self._sums.tokens += num_tokens
        if num_expected > 0:
            self._sums.brought += num_tokens
            self._sums.expected += num_expected

    def swept(self, sweep_seconds: float, now: float) -> None:
        """Record the end of a sweep whose calls are all answered."""
        passed = now - self._last_end if self._last_end is not None else sweep_seconds
        self._last_end = now
        gap = max(0.0, passed - sweep_seconds) if passed <= IDLE * sweep_seconds else 0.0
        self._sums.seconds += sweep_seconds + gap
        self._sums.gaps += gap
        self._sums.sweeps += 1
        self._sums = self._sums.faded()

    @property
    def tokens_per_second(self) -> float:
        """Tokens a second; 0 before the first sweep."""
        return self._sums.tokens / self._sums.seconds if self._sums.seconds else 0.0

    @property
    def price(self) -> Price:
        """The price for dividing a sweep among trees with estimated values."""
        sums = self._sums
        measure = sums.expected / sums.brought if sums.brought else 1.0
        return Price(self.tokens_per_second * measure, sums.gaps / sums.sweeps if sums.sweeps else 0.0)
