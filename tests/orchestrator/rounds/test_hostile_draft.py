"""A draft worker that answers with nonsense costs a round its guesses (docs/design.md, rule 1)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import grpc
import numpy as np
import pytest

from bough.client import Client
from bough.errors import BoughError, InvalidRequest
from bough.protocol import codec
from bough.protocol.generation import Speculation
from bough.protocol.messages import GrowResult, Timings
from bough.rpc.status_map import ERROR_KEY, HASH_KEY, LENGTH_KEY
from bough.trees.tree import MOST_ENTRIES, DraftProbs, Tree
from bough.trees.tree_plan import Scheme, StaticShape
from orchestrator.cluster.worker_clients import DraftClient
from orchestrator.sessions.session import MAX_WARNING_LENGTH, MAX_WARNINGS
from tests.fakes.fleet import FakeDraft, Fleet
from tests.fakes.streams import OPTIONS, expected, read


@pytest.mark.parametrize("length", ["-5", "many", "", "9" * 30])
async def test_impossible_claims_of_a_draft_are_rejected(fakes: Fleet, length: str) -> None:
    await fakes.target("t1")
    draft = FakeDraft("d1", fakes.tokenizer)

    async def grow(request: Any, context: Any) -> None:
        metadata = ((ERROR_KEY, "PrefixMissing"), (LENGTH_KEY, length), (HASH_KEY, "x"))
        await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "no", metadata)

    draft.Grow = grow
    await fakes.worker(draft)
    requests, server = await fakes.orchestrator("--draft", "workers")
    async with Client(server.address) as client:
        seen = await read(client)
    assert seen.token_ids == expected(fakes)
    assert requests.directory.find("d1") is None or seen.end.speculation.num_degraded_rounds


async def test_invalid_messages_of_a_draft_are_rejected() -> None:
    """gRPC turns it into None, and only logs that."""

    async def call(_request: object, **_options: float) -> None:
        return None

    client = DraftClient("127.0.0.1:1")
    with pytest.raises(BoughError, match=r"127\.0\.0\.1:1: its answer cannot be decoded"):
        await client._ask(call, None, 1.0)
    await client.close()


def chain(root: int, depth: int) -> Tree:
    """A path of guesses below a root."""
    return Tree.of([root, *[5] * depth], [-1, *range(depth)], [0.0] + [-0.5] * depth)


def sampled_from(num_entries: int, num_nodes: int = 1) -> DraftProbs:
    """What the children of the first nodes were sampled from: this many tokens."""
    tokens, weights = np.arange(num_entries, dtype=np.int32), np.ones(num_entries, np.float32)
    return DraftProbs.joined(dict.fromkeys(range(num_nodes), (tokens, weights)))


def drawn(tree: Tree, draws: list[int], draft_probs: DraftProbs) -> Tree:
    """As a sample."""
    return replace(tree, draft_probs=draft_probs, draws=np.array(draws, np.int32))


def unwanted(root: int) -> Tree:
    """With draws, where the target draws for itself."""
    return replace(chain(root, 2), draws=np.array([1, 2], np.int32))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("answer", "scheme", "why"),
    [
        (lambda root: replace(chain(root, 2), draft_probs=sampled_from(8)), Scheme.TARGET, "no sample was requested"),
        (unwanted, Scheme.TARGET, "no sample was requested"),
        (lambda root: chain(root, 6), Scheme.TARGET, "tree: must have at most 4 levels, got 6"),
        (
            lambda root: drawn(chain(root, 1), [1], sampled_from(MOST_ENTRIES + 1)),
            Scheme.WITHOUT_REPLACEMENT,
            f"tree.draft_probs: node 0 must have at most {MOST_ENTRIES} tokens, got {MOST_ENTRIES + 1}",
        ),
        (
            lambda root: drawn(chain(root, 1), [1] * 20_000, sampled_from(8)),
            Scheme.WITHOUT_REPLACEMENT,
            "tree.draws: must have each node at most once",
        ),
        (
            lambda root: drawn(chain(root, 2), [2], sampled_from(8, 2)),
            Scheme.WITHOUT_REPLACEMENT,
            "tree.draws: must include the parent of each node, got node 2 without 1",
        ),
    ],
)
async def test_unrequested_trees_are_rejected(
    fakes: Fleet, answer: Callable[[int], Tree], scheme: Scheme, why: str
) -> None:
    """Samples were merged with what was looked up, beyond the budget; draws kept the thread that sweeps busy."""
    target, _ = await fakes.target("t1")
    draft = FakeDraft("d1", fakes.tokenizer)

    async def grow(request: Any, context: Any) -> Any:
        return codec.grow_result_to_wire(GrowResult(answer(request.root_token), 0, Timings()))

    draft.Grow = grow
    await fakes.worker(draft)
    _, server = await fakes.orchestrator("--draft", "workers", "--lookup", "0")
    async with Client(server.address) as client:
        speculation = Speculation(growth=StaticShape.chains(2, 4), scheme=scheme)
        seen = await read(client, replace(OPTIONS, speculation=speculation))
    assert seen.token_ids == expected(fakes)
    assert seen.end.speculation.num_degraded_rounds
    assert why in seen.end.warnings[0]
    assert {len(call.tree) for call in target.calls} == {1}


async def test_no_requested_tree_extends_beyond_the_output(fakes: Fleet) -> None:
    """For any requested growth: deeper nodes may have no place in the target's context."""
    await fakes.target("t1")
    draft = FakeDraft("d1", fakes.tokenizer)
    await fakes.worker(draft)
    _, server = await fakes.orchestrator("--draft", "workers", "--lookup", "0")
    async with Client(server.address) as client:
        options = replace(OPTIONS, max_tokens=6, speculation=Speculation(growth=StaticShape.chains(2, 4)))
        await read(client, options)
    assert [growth.depth for growth in draft.growths] == [4, 4, 3, 2, 1]


async def test_warnings_of_a_draft_do_not_fill_the_last_event(fakes: Fleet) -> None:
    """The last event once grew past what a message may have, and the end of the answer was lost."""
    await fakes.target("t1")
    draft = FakeDraft("d1", fakes.tokenizer)

    async def grow(request: Any, context: Any) -> Any:
        draft.rounds.append(request.round)
        raise InvalidRequest(f"round {request.round}", "x" * 4000)

    draft.Grow = grow
    await fakes.worker(draft)
    _, server = await fakes.orchestrator("--draft", "workers", "--lookup", "0")
    async with Client(server.address) as client:
        seen = await read(client)
    assert len(draft.rounds) > MAX_WARNINGS + 3
    *first, last = seen.end.warnings
    assert [warning[:40] for warning in first] == [
        f"a draft worker failed (round {number}: {'x' * 40}"[:40] for number in draft.rounds[:MAX_WARNINGS]
    ]
    assert all(len(warning) < MAX_WARNING_LENGTH + 40 for warning in first)
    assert last == f"{len(draft.rounds) - MAX_WARNINGS} more warnings came after these {MAX_WARNINGS}"
