"""The plan of a load test, passed from the command to locust's process."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from loadtest.locust.mix import Kind

VARIABLE: Final = "LOADTEST_PLAN"  # environment variable


@dataclass(frozen=True, slots=True)
class Plan:
    """Users and their behaviour."""

    doors: tuple[str, ...]  # "grpc", "http": APIs among which users are distributed
    address: str  # of gRPC
    http_url: str  # without /v1
    kinds: tuple[Kind, ...]
    conversations: float  # share of users who hold conversations, 0 to 1
    turns: int  # in a conversation
    think_seconds: float  # mean pause between an answer and the next question
    rate: float  # offered requests per second (open loop); 0 is a closed loop of users
    timeout_seconds: float  # of a request
    samples_path: str  # file with a line of JSON for each request
    seed: int
    # Settings of the climbing load shape; 0 step_users is a constant number of users.
    step_users: int = 0
    step_seconds: float = 20.0
    max_users: int = 512
    bend: float = 3.0  # factor of the first step's TTFT (p95) at which latency counts as risen
    most_seconds: float = 1800.0  # after which the climb ends

    def write_bent_at(self, users: int) -> None:
        """Keep the number of users at which latency rose, 0 for none, for the command."""
        self._bent_path.write_text(str(users))

    def read_bent_at(self) -> int:
        """What `write_bent_at` kept; 0 if nothing is kept."""
        return int(self._bent_path.read_text()) if self._bent_path.exists() else 0

    @property
    def _bent_path(self) -> Path:
        return Path(self.samples_path).with_suffix(".bent")

    def to_environment(self) -> dict[str, str]:
        """The plan as an environment variable."""
        return {VARIABLE: json.dumps(asdict(self))}


def plan_from_environment() -> Plan:
    """Read what `to_environment` wrote. Raises KeyError if it is missing, as when locust was started by hand."""
    values = json.loads(os.environ[VARIABLE])
    kinds = tuple(Kind(**kind) for kind in values.pop("kinds"))
    return Plan(**{**values, "kinds": kinds, "doors": tuple(values["doors"])})
