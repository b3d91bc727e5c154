"""Tokens per second of the demonstration on two hosts, over two networks, and on one that streams from its disk."""

from __future__ import annotations

import os
import sys
import uuid
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any, NamedTuple

from bough.client import Client
from bough.config.cache_paths import SUBSTITUTE_DROPS, demonstration_folder
from bough.processes.demonstration import ensure_demonstration
from bough.protocol.generation import ChatPrompt, GenerateOptions, Message, Speculation
from loadtest.cluster.hosts import Host
from loadtest.common.prompts import load_prompts
from loadtest.common.stacks import settings_of
from loadtest.common.streams import Stream, stream
from loadtest.regret.scoring import geomean
from loadtest.stages.hosts import Network, memory_of, served

NETWORKS = {"1_gbit_0.5_ms": Network(1000, 0.0005), "100_mbit_10_ms": Network(100, 0.01)}
FAST, SLOW = NETWORKS
ONE_HOST = "one_host"
HOSTS = {FAST: ("head1", "stage1"), SLOW: ("head2", "stage2"), ONE_HOST: ("alone",)}
DISK_BYTES_PER_SECOND = 500_000_000
MODEL = ("--max-context", "384", "--max-nodes", "128")
TARGET = ("--device-memory", "1.4GB", "--kv-memory", "118MB")  # all layers stay on two hosts, a third on one
SELF, PLAIN = "self-sized", "plain"


class Run(NamedTuple):
    """One answer of one contestant."""

    seconds_a_token: float
    nodes: float  # mean of its trees, self-sized
    token_ids: Sequence[int]


Runs = Mapping[tuple[str, str], Sequence[Run]]  # by side and way to decode


async def compare(repeats: int, num_tokens: int, plain_tokens: int, hosts: Mapping[str, Host]) -> Runs:
    """Let all sides answer one prompt after another, in rotating order; plain decoding on two hosts only."""
    ensure_demonstration()
    model = ["--model", str(demonstration_folder()), *MODEL]
    settings = settings_of([*model, *TARGET], [*model, "--drop-layers", SUBSTITUTE_DROPS])
    prompts = [ChatPrompt((Message("user", text),)) for text in load_prompts()]
    runs = defaultdict(list)
    async with AsyncExitStack() as stack:
        clients = {}
        for side, names in HOSTS.items():  # one after another, as each measures its speeds at its start
            speed = 0 if side in NETWORKS else DISK_BYTES_PER_SECOND
            members = [hosts[name] for name in names]
            cluster = await stack.enter_async_context(served(settings, members, NETWORKS.get(side), speed))
            print(side, memory_of(cluster), file=sys.stderr, flush=True)
            clients[side] = await stack.enter_async_context(Client(cluster.address))
        contestants = [(side, how) for side in HOSTS for how in (SELF, PLAIN) if side in NETWORKS or how == SELF]
        for number in range(-1, repeats):  # the first prompt only shows the sizers what a sweep takes
            turn = number % len(contestants)
            for side, how in (*contestants[turn:], *contestants[:turn]):
                most = plain_tokens if how == PLAIN else num_tokens
                run = await _answer(clients[side], prompts[number], how, most)
                if number >= 0:
                    runs[side, how].append(run)
    return runs


async def _answer(client: Client, prompt: ChatPrompt, how: str, num_tokens: int) -> Run:
    options = GenerateOptions(
        temperature=0.0,
        max_tokens=num_tokens,
        ignore_eos=True,
        request_id=uuid.uuid4().hex,
        speculation=Speculation(disabled=how == PLAIN),
    )
    received: Stream = await stream(client, prompt, options)
    sizes = [each.num_sent - each.num_left_out for each in await client.decisions(options.request_id)]
    return Run(received.seconds_a_token, sum(sizes) / len(sizes), received.token_ids)


def figures(runs: Runs) -> dict[str, Any]:
    """Ratios are geometric means over repeats, each of two answers to the same prompt."""

    def ratio(slower: tuple[str, str], faster: tuple[str, str]) -> float:
        pairs = zip(runs[slower], runs[faster], strict=True)
        return round(geomean([theirs.seconds_a_token / ours.seconds_a_token for theirs, ours in pairs]), 3)

    sides = {side: runs[side, SELF] for side in HOSTS}
    return {
        "two_hosts_over_one": ratio((ONE_HOST, SELF), (FAST, SELF)),
        "nodes": {side: round(sum(run.nodes for run in own) / len(own), 1) for side, own in sides.items()},
        "self_sized_over_plain": {side: ratio((side, PLAIN), (side, SELF)) for side in NETWORKS},
        "tokens_per_second": {
            f"{side}, {how}": round(1 / geomean([run.seconds_a_token for run in own]), 2)
            for (side, how), own in runs.items()
        },
        "unequal_answers": sum(
            not _are_equal(answers) for answers in zip(*(own for own in runs.values()), strict=True)
        ),
        "load_average": round(os.getloadavg()[0], 1),
    }


def _are_equal(answers: Sequence[Run]) -> bool:
    """Whether answers to one prompt are equal, as far as the shortest goes."""
    shortest = min(len(each.token_ids) for each in answers)
    return len({tuple(each.token_ids[:shortest]) for each in answers}) == 1
