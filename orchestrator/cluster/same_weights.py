"""Which targets have the same weights. Some of them know it of themselves only a while after they have begun."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from itertools import combinations
from typing import TYPE_CHECKING

from bough.errors import BoughError

if TYPE_CHECKING:
    from orchestrator.cluster.worker_clients import TargetClient
    from orchestrator.cluster.worker_handle import WorkerHandle

    Targets = Sequence[WorkerHandle[TargetClient]]

logger = logging.getLogger(__name__)

LOOK_SECONDS = 5.0  # between two times at which those are asked that did not know


def with_weights(targets: Targets, weights_hash: str) -> Targets:
    """Those, of targets that pass for one model, at which what has begun with these weights may go on.

    As long as no two of them are known to differ, their samples are believed; after that only a hash that is the same.
    """
    known = {target.info.weights_hash for target in targets} | {weights_hash}
    if len(known - {""}) <= 1:
        return targets
    return [target for target in targets if weights_hash and target.info.weights_hash == weights_hash]


def other_weights(targets: Targets, weights_hash: str) -> str:
    """Of targets that are left out by `with_weights`, for an error: which they are, and the hashes."""
    theirs = ", ".join(f"{known.record.worker_id} has {known.info.weights_hash or 'unknown ones'}" for known in targets)
    return f"weights: it began with {weights_hash or 'unknown ones'}, and {theirs}"


async def watch_weights(targets: Callable[[], Targets]) -> None:
    """Asks those that did not know their hash again, and says which of them pass for one model and are not."""
    told: set[str] = set()
    while True:
        for target in targets():
            if not target.info.weights_hash and target.is_usable:
                try:
                    target.learn(await target.client.info())
                except BoughError as exc:
                    logger.debug("%s does not tell its weights: %s", target.record.worker_id, exc)
        found = {first.info.contradiction(second.info) for first, second in combinations(targets(), 2)} - {""}
        for contradiction in found - told:
            logger.warning("%s; sessions do not move between them", contradiction)
        told = found
        await asyncio.sleep(LOOK_SECONDS)
