"""Profiles of simulated workers, read from JSON files: times, limits, acceptance, events and failures.

A sweep takes max(link(rows), compute(padded rows)) + overhead seconds, a draft step a base plus a cost for each row of
all sessions in it, and a call the network's latency. Events scale these during a run; failures make calls fail.
"""

from __future__ import annotations

import importlib.resources
import math
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Annotated, Literal, NamedTuple

from pydantic import Field, PlainValidator

from bough.errors import ConfigError
from bough.protocol.cost_curve import CostCurve
from bough.simulation.acceptance_model import AcceptanceModel, read_acceptance_model
from bough.simulation.reading import Count, Curve, Number, Positive, as_written, read_text, refusal
from bough.sizing.distinct_experts import Mixture, distinct_share
from bough.sizing.sweep_times import LEAST_SECONDS, SweepTimes

Jitter = Annotated[float, Field(ge=0, le=2)]  # relative standard deviation, lognormal with mean 1
Factor = Annotated[float, Field(ge=0, le=1000)]


class Factors(NamedTuple):
    """Factors that multiply times at some moment."""

    link: float = 1.0
    compute: float = 1.0
    draft: float = 1.0
    network: float = 1.0


UNCHANGED = Factors()
CHUNK_ROWS = 64  # rows of a target that are computed together, rounded up to the row step
ROW_BYTES = 320 * 1024  # KV bytes of a token, as of a 70B model; reported, but never allocated
PRIOR_ROWS = (1, 8, 64, 256, 1024)  # of the cost curve before the first sweep
LINK_BYTES = 1000**3  # bytes that the link is reported to carry in a second


class SweepSeconds(NamedTuple):
    """The parts of one sweep's time."""

    total: float
    waited: float  # part of it waiting for the link
    link: float  # the link was busy


@as_written
@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts whose sweeps also read the experts that their rows choose."""

    miss_seconds: Number  # to read all experts that are not in memory
    num_experts: Count  # in a layer
    experts_per_token: Count
    overlap: Annotated[float, Field(ge=0, lt=1)] = 0.0  # correlation of two rows' choices

    def share(self, num_rows: int) -> float:
        """Share of the experts that `num_rows` rows choose together."""
        return float(distinct_share(self.experts_per_token / self.num_experts, num_rows, self.overlap))


@as_written
@dataclass(frozen=True, slots=True)
class TargetProfile:
    """Times and limits of a target worker."""

    link_seconds: Number = 0.0  # to read the weights in each sweep; 0 is resident
    compute_base_seconds: Number = 0.0
    compute_row_seconds: Number = 0.0
    compute_curve: Curve = ()  # (rows, seconds), instead of base and slope
    row_step: Count = 1  # rows are padded to multiples of this
    experts: Experts | None = None
    overhead_seconds: Number = 0.0
    jitter: Jitter = 0.0  # relative standard deviation, lognormal with mean 1
    max_nodes: Count = 512
    max_context: Annotated[int, Field(ge=2)] = 4096
    max_sweep_rows: Annotated[int, Field(ge=8)] = 1024  # at least max_nodes, as a sweep contains whole trees
    kv_tokens: Count = 65536

    def padded(self, num_rows: int) -> int:
        """`num_rows` padded to a multiple of `row_step`."""
        return -(-num_rows // self.row_step) * self.row_step

    def link_seconds_of(self, num_rows: int) -> float:
        """Link seconds: weights of each sweep, and the experts that its rows choose."""
        experts = self.experts
        return self.link_seconds + (experts.miss_seconds * experts.share(num_rows) if experts else 0.0)

    def expert_ratio(self, num_rows: int) -> float:
        """Distinct experts of `num_rows` rows over those of one; 0 without experts."""
        return self.experts.share(num_rows) / self.experts.share(1) if self.experts else 0.0

    def compute_seconds(self, num_rows: int) -> float:
        """Compute seconds of the padded rows; never decreases with rows."""
        rows = self.padded(num_rows)
        if self.compute_curve:
            known, known_seconds = zip(*self.compute_curve, strict=True)
            return CostCurve(known, known_seconds)(rows)
        return self.compute_base_seconds + self.compute_row_seconds * rows

    def sweep_seconds(self, num_rows: int, factors: Factors = UNCHANGED) -> float:
        """Seconds of a sweep without jitter; link and compute are concurrent."""
        link, compute = self.link_seconds_of(num_rows) * factors.link, self.compute_seconds(num_rows) * factors.compute
        return max(link, compute) + self.overhead_seconds

    def sweep(self, num_rows: int, factors: Factors, random: Random) -> SweepSeconds:
        """Seconds of one sweep, with jitter."""
        luck = jittered(1.0, self.jitter, random)
        link, compute = self.link_seconds_of(num_rows) * factors.link, self.compute_seconds(num_rows) * factors.compute
        total = luck * self.sweep_seconds(num_rows, factors)
        return SweepSeconds(total, luck * max(0.0, link - compute), luck * link)

    @property
    def chunk_rows(self) -> int:
        """Rows that are computed together."""
        return self.padded(CHUNK_ROWS)

    def link_bytes(self, num_rows: int) -> int:
        """Bytes that a sweep of `num_rows` rows is reported to bring across the link."""
        return round(LINK_BYTES * self.link_seconds_of(num_rows))

    def known_times(self, factor: float) -> SweepTimes:
        """What is known of sweeps before the first one: times without jitter, multiplied by `factor`."""
        experts, step = self.experts, self.row_step if self.experts is None else 1  # padding chooses no experts
        rows = (step, *(size for size in PRIOR_ROWS if step < size <= self.max_sweep_rows))
        seconds = (factor * (self.compute_seconds(size) + self.overhead_seconds) for size in rows)
        curve = CostCurve(rows, tuple(max(LEAST_SECONDS, each) for each in seconds), step)
        mixture, link = None, (self.link_bytes(1), factor * self.link_seconds_of(1))
        if experts is not None:
            num_bytes = (round(LINK_BYTES * seconds) for seconds in (self.link_seconds, experts.miss_seconds))
            mixture = Mixture(experts.num_experts, experts.experts_per_token, *num_bytes)
        return SweepTimes(step, self.max_sweep_rows, curve, *link, mixture)


@as_written
@dataclass(frozen=True, slots=True)
class DraftProfile:
    """Times of a draft worker; a step serves the frontiers of all sessions that grow at the same time."""

    base_seconds: Number = 0.0
    row_seconds: Number = 0.0
    prefill_token_seconds: Number = 0.0
    jitter: Jitter = 0.0

    def step_seconds(self, num_rows: int, factors: Factors = UNCHANGED) -> float:
        """Seconds of a step with `num_rows` rows, all sessions together, without jitter."""
        return (self.base_seconds + self.row_seconds * num_rows) * factors.draft

    def prefill_seconds(self, num_tokens: int, factors: Factors = UNCHANGED) -> float:
        """Seconds to compute `num_tokens` context tokens."""
        return self.prefill_token_seconds * num_tokens * factors.draft

    def step(self, num_rows: int, num_context: int, factors: Factors, random: Random) -> float:
        """Seconds of one step that also computes `num_context` context tokens, with jitter."""
        seconds = self.step_seconds(num_rows, factors) + self.prefill_seconds(num_context, factors)
        return jittered(seconds, self.jitter, random)


@as_written
@dataclass(frozen=True, slots=True)
class NetworkProfile:
    """The network between the orchestrator and its workers."""

    one_way_seconds: Number = 0.0  # added to each call twice

    def call_seconds(self, factors: Factors = UNCHANGED) -> float:
        """Seconds added to a call, both ways."""
        return 2 * self.one_way_seconds * factors.network


@as_written
@dataclass(frozen=True, slots=True)
class Event:
    """Factors that multiply times from a second on; several events make a drift."""

    at_second: Number
    link: Factor = 1.0
    compute: Factor = 1.0
    draft: Factor = 1.0
    network: Factor = 1.0


@as_written
@dataclass(frozen=True, slots=True)
class Failure:
    """An interval in which calls of a worker fail, each with a probability."""

    worker: Literal["target", "draft"]
    kind: Literal["unavailable", "hang"] = "unavailable"
    at_second: Number = 0.0
    for_seconds: Positive | None = None  # None is forever
    probability: Annotated[float, Field(ge=0, le=1)] = 1.0

    def is_active(self, second: float) -> bool:
        """Whether calls may fail at this second."""
        return self.at_second <= second and (self.for_seconds is None or second < self.at_second + self.for_seconds)


@as_written
@dataclass(frozen=True, slots=True)
class Profile:
    """A target, a draft, their network, the acceptance of guesses, and events and failures during a run."""

    source: Annotated[str, Field(min_length=1)]  # how the numbers were measured or derived
    target: TargetProfile
    draft: DraftProfile
    acceptance: Annotated[AcceptanceModel, PlainValidator(read_acceptance_model)]
    network: NetworkProfile = NetworkProfile()
    events: tuple[Event, ...] = ()
    failures: tuple[Failure, ...] = ()
    clock_scale: Positive = 1.0  # simulated seconds in a real one

    def factors_at(self, second: float) -> Factors:
        """The product of all past events."""
        factors = UNCHANGED
        for event in self.events:
            if event.at_second <= second:
                own = Factors(event.link, event.compute, event.draft, event.network)
                factors = Factors(*(a * b for a, b in zip(factors, own, strict=True)))
        return factors

    def failure_at(self, worker: str, second: float, uniform: float) -> Failure | None:
        """The failure of a call at `second`, if any; `uniform` in [0, 1) is compared with its probability."""
        for failure in self.failures:
            if failure.worker == worker and failure.is_active(second) and uniform < failure.probability:
                return failure
        return None


def jittered(seconds: float, jitter: float, random: Random) -> float:
    """`seconds` times a lognormal number of mean 1 and relative standard deviation `jitter`."""
    if not jitter or not seconds:
        return seconds
    sigma = math.sqrt(math.log1p(jitter * jitter))
    return seconds * math.exp(random.normalvariate(0.0, sigma) - sigma * sigma / 2)


def shipped_profiles() -> tuple[str, ...]:
    """Sorted names of the shipped profiles."""
    folder = importlib.resources.files("bough.simulation") / "profiles"
    return tuple(sorted(entry.name.removesuffix(".json") for entry in folder.iterdir() if entry.name.endswith(".json")))


def load_profile(name: str) -> Profile:
    """Load a shipped profile by name, or a JSON file by path.

    Raises:
        ConfigError: it is neither, or a field is invalid.
    """
    shipped = importlib.resources.files("bough.simulation") / "profiles" / f"{name}.json"
    known = shipped_profiles()
    try:
        content = (shipped if name in known else Path(name)).read_text(encoding="utf-8")
    except (OSError, ValueError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else "not text in UTF-8"
        must = f"must be a JSON file, or one of {', '.join(known)}"
        raise ConfigError(f"profile: {must}, got {name!r}: {reason}") from exc
    try:
        return parse_profile(content)
    except ConfigError as exc:
        raise ConfigError(f"{name}: {exc}") from exc


def parse_profile(content: str) -> Profile:
    """Parse a profile from JSON text.

    Raises:
        ConfigError: it is no JSON object, or a field is invalid.
    """
    profile = read_text(Profile, "", content)
    _check(profile)
    return profile


def _check(profile: Profile) -> None:
    """Check fields against one another; raises ConfigError."""
    target = profile.target
    if target.compute_curve and (target.compute_base_seconds or target.compute_row_seconds):
        raise refusal("target.compute_curve", "given", "empty if compute_base_seconds or compute_row_seconds is given")
    if target.max_sweep_rows < target.max_nodes:
        raise refusal("target.max_sweep_rows", target.max_sweep_rows, f"at least max_nodes, {target.max_nodes}")
    if (experts := target.experts) and experts.experts_per_token > experts.num_experts:
        raise refusal(
            "target.experts.experts_per_token",
            experts.experts_per_token,
            f"at most num_experts, {experts.num_experts}",
        )
    if not target.sweep_seconds(1):
        raise refusal("target.compute_base_seconds", 0.0, "above 0 if nothing else takes time, as a sweep takes some")
