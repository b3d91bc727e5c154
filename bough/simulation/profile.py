"""Profiles: how long simulated workers take and what they guess, read from JSON files and refused by name.

A sweep takes max(link(rows), compute(padded rows)) + overhead seconds, a draft step as long as the rows of all sessions
in it cost, a call as long as the network adds. Events change any of these in mid-run, failures stop a worker.
"""

from __future__ import annotations

import importlib.resources
import json
import math
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import NamedTuple

from bough.errors import ConfigError
from bough.simulation.acceptance_law import AcceptanceLaw, read_acceptance_law
from bough.simulation.reading import (
    choice,
    count,
    curve,
    described,
    number,
    optional,
    part,
    parts,
    read_part,
    refusal,
    text,
)


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts whose sweeps read, besides the link's seconds, the experts that their rows choose."""

    miss_seconds: float = described(number())  # of all experts that are not in memory
    num_experts: int = described(count(1))  # of a layer
    experts_per_token: int = described(count(1))

    def seconds(self, num_rows: int) -> float:
        """What so many rows read, each choosing by itself: concave in rows."""
        return self.miss_seconds * (1 - (1 - self.experts_per_token / self.num_experts) ** num_rows)


@dataclass(frozen=True, slots=True)
class TargetProfile:
    """Seconds and limits of a target worker."""

    link_seconds: float = described(number(), 0.0)  # of the weights that every sweep reads; 0 is resident
    compute_base_seconds: float = described(number(), 0.0)
    compute_row_seconds: float = described(number(), 0.0)
    compute_curve: tuple[tuple[float, float], ...] = described(curve, ())  # (rows, seconds), instead of base and slope
    row_step: int = described(count(1), 1)  # rows are padded to multiples of it
    second_knee_rows: int | None = described(optional(count(1)), None)
    second_knee_row_seconds: float = described(number(), 0.0)  # that each padded row beyond it adds besides
    experts: Experts | None = described(optional(part(Experts)), None)
    overhead_seconds: float = described(number(), 0.0)
    jitter: float = described(number(0, 2), 0.0)  # relative standard deviation, lognormal with mean 1
    max_nodes: int = described(count(1), 512)
    max_context: int = described(count(2), 4096)
    max_sweep_rows: int = described(count(1), 1024)
    kv_tokens: int = described(count(1), 65536)

    def padded(self, num_rows: int) -> int:
        """Rows that are computed where so many are wanted."""
        return -(-num_rows // self.row_step) * self.row_step

    def link_seconds_of(self, num_rows: int) -> float:
        """What crosses the link: every sweep's weights, and the experts that rows choose."""
        return self.link_seconds + (self.experts.seconds(num_rows) if self.experts else 0.0)

    def compute_seconds(self, num_rows: int) -> float:
        """Products of all padded rows; never less for more rows."""
        rows = self.padded(num_rows)
        if self.compute_curve:
            seconds = interpolated(self.compute_curve, rows)
        else:
            seconds = self.compute_base_seconds + self.compute_row_seconds * rows
        beyond = max(0, rows - self.second_knee_rows) if self.second_knee_rows is not None else 0
        return seconds + self.second_knee_row_seconds * beyond

    def sweep_seconds(self, num_rows: int, factors: Factors | None = None) -> float:
        """One sweep of so many rows, without jitter: link and compute go on at the same time."""
        link, compute = self.link_seconds_of(num_rows), self.compute_seconds(num_rows)
        if factors is not None:
            link, compute = link * factors.link, compute * factors.compute
        return max(link, compute) + self.overhead_seconds

    def knee(self, factors: Factors | None = None) -> int:
        """The most rows within `max_sweep_rows` that take no longer than one row, but for what experts they read."""
        factors = factors or Factors()

        def is_free(rows: int) -> bool:
            link = max(self.link_seconds_of(rows) * factors.link, self.compute_seconds(1) * factors.compute)
            return self.compute_seconds(rows) * factors.compute <= link

        low, high = 1, self.max_sweep_rows
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if is_free(middle) else (low, middle - 1)
        return low


@dataclass(frozen=True, slots=True)
class DraftProfile:
    """Seconds of a draft worker; one step serves the frontiers of all sessions that grow at the same time."""

    base_seconds: float = described(number(), 0.0)
    row_seconds: float = described(number(), 0.0)
    prefill_token_seconds: float = described(number(), 0.0)
    jitter: float = described(number(0, 2), 0.0)

    def step_seconds(self, num_rows: int, factors: Factors | None = None) -> float:
        """One step of so many rows, of all sessions together, without jitter."""
        return (self.base_seconds + self.row_seconds * num_rows) * (factors.draft if factors else 1.0)

    def prefill_seconds(self, num_tokens: int, factors: Factors | None = None) -> float:
        """Tokens of context that the draft has not read."""
        return self.prefill_token_seconds * num_tokens * (factors.draft if factors else 1.0)


@dataclass(frozen=True, slots=True)
class NetworkProfile:
    """What lies between the orchestrator and its workers."""

    one_way_seconds: float = described(number(), 0.0)  # added to every call twice: there and back

    def call_seconds(self, factors: Factors | None = None) -> float:
        """Added to one call, there and back."""
        return 2 * self.one_way_seconds * (factors.network if factors else 1.0)


@dataclass(frozen=True, slots=True)
class Event:
    """From a second on, things take so many times as long; several at different seconds make a drift."""

    at_second: float = described(number())
    link: float = described(number(0, 1000), 1.0)
    compute: float = described(number(0, 1000), 1.0)
    draft: float = described(number(0, 1000), 1.0)
    network: float = described(number(0, 1000), 1.0)


class Factors(NamedTuple):
    """By what seconds are multiplied at some moment."""

    link: float = 1.0
    compute: float = 1.0
    draft: float = 1.0
    network: float = 1.0


@dataclass(frozen=True, slots=True)
class Failure:
    """A worker's calls fail from a second on, for so long, each with a probability."""

    worker: str = described(choice("target", "draft"))
    kind: str = described(choice("unavailable", "hang"), "unavailable")
    at_second: float = described(number(), 0.0)
    for_seconds: float | None = described(optional(number(above=True)), None)  # None is for ever
    probability: float = described(number(0, 1), 1.0)

    def is_active(self, second: float) -> bool:
        """Whether calls may fail at this second."""
        return self.at_second <= second and (self.for_seconds is None or second < self.at_second + self.for_seconds)


@dataclass(frozen=True, slots=True)
class Profile:
    """A target, a draft, what lies between them, what the draft's guesses are worth, and what happens in mid-run."""

    source: str = described(text)  # measured or reckoned, and from what
    target: TargetProfile = described(part(TargetProfile))
    draft: DraftProfile = described(part(DraftProfile))
    acceptance: AcceptanceLaw = described(read_acceptance_law)
    network: NetworkProfile = described(part(NetworkProfile), NetworkProfile())
    events: tuple[Event, ...] = described(parts(Event), ())
    failures: tuple[Failure, ...] = described(parts(Failure), ())
    clock_scale: float = described(number(above=True), 1.0)  # simulated seconds in a real one

    def factors_at(self, second: float) -> Factors:
        """The product of all events that have happened."""
        factors = Factors()
        for event in self.events:
            if event.at_second <= second:
                own = Factors(event.link, event.compute, event.draft, event.network)
                factors = Factors(*(a * b for a, b in zip(factors, own, strict=True)))
        return factors

    def failure_at(self, worker: str, second: float, uniform: float) -> Failure | None:
        """What makes a call fail that comes now; `uniform` from 0 to 1 decides where failures have a probability."""
        for failure in self.failures:
            if failure.worker == worker and failure.is_active(second) and uniform < failure.probability:
                return failure
        return None


def interpolated(points: tuple[tuple[float, float], ...], rows: float) -> float:
    """Between the two points that lie around, or on the line through the last two; the first's height before it."""
    if rows <= points[0][0]:
        return points[0][1]
    above = min(len(points) - 1, sum(known <= rows for known, _ in points))
    (low, low_seconds), (high, high_seconds) = points[above - 1 : above + 1]
    return low_seconds + (high_seconds - low_seconds) * (rows - low) / (high - low)


def jittered(seconds: float, jitter: float, random: Random) -> float:
    """Times a lognormal number of mean 1 and about this relative standard deviation."""
    if not jitter or not seconds:
        return seconds
    sigma = math.sqrt(math.log1p(jitter * jitter))
    return seconds * math.exp(random.normalvariate(0.0, sigma) - sigma * sigma / 2)


def shipped_profiles() -> tuple[str, ...]:
    """Names of the profiles that come with bough, in order."""
    folder = importlib.resources.files("bough.simulation") / "profiles"
    return tuple(sorted(entry.name.removesuffix(".json") for entry in folder.iterdir() if entry.name.endswith(".json")))


def load_profile(name: str) -> Profile:
    """A shipped profile by its name, or one from a JSON file by its path.

    Raises:
        ConfigError: it is neither, or a field does not fit.
    """
    if name in shipped_profiles():
        content = (importlib.resources.files("bough.simulation") / "profiles" / f"{name}.json").read_text()
    elif Path(name).is_file():
        content = Path(name).read_text()
    else:
        raise refusal("profile", name, f"a JSON file, or one of {', '.join(shipped_profiles())}")
    return parse_profile(content)


def parse_profile(content: str) -> Profile:
    """From JSON text.

    Raises:
        ConfigError: it is no JSON object, or a field does not fit.
    """
    try:
        value = json.loads(content)
    except ValueError as exc:
        raise ConfigError(f"profile: value was no JSON ({exc}); must be one object") from exc
    profile = read_part(Profile, "", value)
    _check(profile)
    return profile


def _check(profile: Profile) -> None:
    """What fields must be to one another."""
    target = profile.target
    if target.compute_curve and (target.compute_base_seconds or target.compute_row_seconds):
        raise refusal(
            "target.compute_curve", "given", "empty where compute_base_seconds or compute_row_seconds is given"
        )
    if target.second_knee_row_seconds and target.second_knee_rows is None:
        raise refusal("target.second_knee_rows", None, "given where second_knee_row_seconds is")
    if (experts := target.experts) and experts.experts_per_token > experts.num_experts:
        raise refusal(
            "target.experts.experts_per_token",
            experts.experts_per_token,
            f"at most num_experts, {experts.num_experts}",
        )
    if not target.sweep_seconds(1):
        raise refusal("target.compute_base_seconds", 0.0, "above 0 where nothing else takes time: a sweep takes some")
