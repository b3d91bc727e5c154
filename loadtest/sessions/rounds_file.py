"""The file that `loadtest.sessions --rounds FILE` writes for `loadtest.capacity`: all rounds of all streams."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter

from bough.errors import ConfigError
from bough.protocol.generation import Tokens
from loadtest.common.streams import Stream
from loadtest.sessions.runs import Together

NANO = 1e9


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """A round; times are in seconds."""

    at: float  # since the stream's request
    num_tokens: int
    num_nodes: int
    depth: int
    total: float
    draft: float
    network: float
    target: float
    queue: float  # part of `target`
    wait: float  # part of `target`: waiting for weights


@dataclass(frozen=True, slots=True)
class StreamRecord:
    """A request; times are in seconds."""

    prompt: int  # number of the prompt
    began: float  # since the run's first request
    first_token: float
    latency: float
    prompt_tokens: int
    cached_tokens: int
    rounds: tuple[RoundRecord, ...]

    @property
    def num_tokens(self) -> int:
        """Number of generated tokens."""
        return sum(each.num_tokens for each in self.rounds)


@dataclass(frozen=True, slots=True)
class RunRecord:
    """Sessions that ran concurrently."""

    num_sessions: int
    seconds: float
    streams: tuple[StreamRecord, ...]

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all sessions together."""
        return sum(each.num_tokens for each in self.streams) / self.seconds


def record_of(run: Together) -> RunRecord:
    """The record of concurrent sessions, or of one alone."""
    start = min(each.began for each in run.streams)
    streams = [_stream(number, each, start) for number, each in zip(run.numbers, run.streams, strict=True)]
    return RunRecord(run.num_sessions, run.seconds, tuple(streams))


def _stream(number: int, each: Stream, start: float) -> StreamRecord:
    usage = each.done.usage
    rounds = tuple(_round(moment - each.began, tokens) for moment, tokens in each.rounds)
    latency = each.ended - each.began
    return StreamRecord(
        number, each.began - start, each.first_token_seconds, latency, usage.prompt_tokens, usage.cached_tokens, rounds
    )


def _round(at: float, tokens: Tokens) -> RoundRecord:
    took = tokens.timings
    nanoseconds = (took.total_ns, took.draft_ns, took.network_ns, took.target_ns, took.queue_ns, took.wait_ns)
    seconds = (round(value / NANO, 6) for value in nanoseconds)
    return RoundRecord(round(at, 6), len(tokens.token_ids), tokens.num_nodes, tokens.tree_depth, *seconds)


def write_runs(path: Path, runs: Iterable[Together]) -> None:
    """Write runs as one JSON object with a line for each run."""
    lines = (json.dumps(asdict(record_of(run))) for run in runs)
    path.write_text('{"runs": [\n' + ",\n".join(lines) + "\n]}\n")


def read_runs(path: Path) -> list[RunRecord]:
    """Read what `write_runs` wrote.

    Raises:
        ConfigError: the file is something else.
    """
    try:
        return TypeAdapter(list[RunRecord]).validate_python(json.loads(path.read_text())["runs"])
    except (OSError, ValueError, TypeError, KeyError) as exc:
        raise ConfigError(f"--sessions: must be a file written by --rounds, got {str(path)!r} ({exc})") from exc
