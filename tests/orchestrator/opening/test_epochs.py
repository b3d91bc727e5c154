"""Epochs with an index and without."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

from bough.registry.records import Claim
from orchestrator.cluster.directory import Directory
from orchestrator.opening.epochs import Epochs

AHEAD = 2**52  # of this machine's clock, in microseconds, as an index's may be


@dataclass
class FakeDirectory:
    """It and its index in one."""

    index_problem: str = ""
    registry: Any = field(init=False)

    def __post_init__(self) -> None:
        self.registry = self

    async def claim_session(self, session_id: str, holder_id: str, epoch: int | None, past: int) -> Claim:
        return Claim(AHEAD, None)


async def test_epochs_go_on_growing_when_the_index_goes() -> None:
    """By a clock that is behind the index's; a target would refuse the session's next turn."""
    directory = FakeDirectory()
    claims = Epochs(cast(Directory, directory), "me")
    epochs = [(await claims.begin("s")).epoch]
    directory.index_problem = "it is gone"
    epochs += [(await claims.begin("s")).epoch, (await claims.begin("s")).epoch]
    assert epochs == [AHEAD, AHEAD + 1, AHEAD + 2]
