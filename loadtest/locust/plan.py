"""What a load test is told to do, as it is handed from the command to locust's own process."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from typing import Final

from loadtest.locust.mix import Kind

VARIABLE: Final = "LOADTEST_PLAN"  # of the environment


@dataclass(frozen=True, slots=True)
class Plan:
    """Users and what they do."""

    doors: tuple[str, ...]  # "grpc", "http": users are dealt out among these
    address: str  # of gRPC
    http_url: str  # without /v1
    kinds: tuple[Kind, ...]
    conversations: float  # share of users who hold conversations, 0 to 1
    turns: int  # of a conversation
    think_seconds: float  # mean pause between an answer and the next question
    rate: float  # requests a second that are offered whatever becomes of them; 0 is a closed loop of users
    timeout_seconds: float  # of a request
    samples_path: str  # a line of JSON for each request goes there
    seed: int
    # Of the shape that climbs; 0 step_users is a constant number of users.
    step_users: int = 0
    step_seconds: float = 20.0
    max_users: int = 512
    bend: float = 3.0  # times the first step's time to first token (p95) at which latency has bent

    def to_environment(self) -> dict[str, str]:
        """For the environment of locust's process."""
        return {VARIABLE: json.dumps(asdict(self))}


def plan_from_environment() -> Plan:
    """What `to_environment` wrote. Raises KeyError where there is none: locust was started by hand."""
    values = json.loads(os.environ[VARIABLE])
    kinds = tuple(Kind(**kind) for kind in values.pop("kinds"))
    return Plan(**{**values, "kinds": kinds, "doors": tuple(values["doors"])})
