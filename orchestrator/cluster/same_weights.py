"""Which targets have the same weights. A target may know its hash only some time after its start."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from itertools import combinations

from bough.errors import BoughError
from orchestrator.cluster.worker_handle import Targets

logger = logging.getLogger(__name__)

LOOK_SECONDS = 5.0  # between two times at which targets without a hash are asked


def with_weights(targets: Targets, weights_hash: str) -> Targets:
    """The targets at which something that was begun with weights of this hash may continue.

    All `targets` pass for one model. Equal samples suffice while no two known hashes differ; after that only an equal
    hash does.
    """
    known = {target.info.weights_hash for target in targets} | {weights_hash}
    if len(known - {""}) <= 1:
        return targets
    return [target for target in targets if weights_hash and target.info.weights_hash == weights_hash]


def other_weights(targets: Targets, weights_hash: str) -> str:
    """Describe the targets that `with_weights` left out and their hashes, for an error message."""
    theirs = ", ".join(f"{known.record.worker_id} has {known.info.weights_hash or 'unknown ones'}" for known in targets)
    return f"weights: it began with {weights_hash or 'unknown ones'}, and {theirs}"


async def watch_weights(targets: Callable[[], Targets]) -> None:
    """Ask targets without a hash again, and log those that pass for one model but have different weights."""
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
