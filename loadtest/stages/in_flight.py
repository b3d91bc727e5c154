"""Tokens per second of four sessions on two hosts with one processor each, with one and with two sweeps in flight."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any

from bough.client import Client
from bough.config.cache_paths import SUBSTITUTE_DROPS, demonstration_folder
from bough.processes.demonstration import ensure_demonstration
from bough.protocol.generation import ChatPrompt, GenerateOptions, Message
from loadtest.cluster.hosts import Host
from loadtest.common.prompts import load_prompts
from loadtest.common.stacks import settings_of
from loadtest.common.streams import stream
from loadtest.regret.scoring import geomean
from loadtest.stages.hosts import served
from loadtest.stages.speed import FAST, MODEL, NETWORKS, TARGET

HOSTS = {1: ("head3", "stage3"), 2: ("head4", "stage4")}  # by number of sweeps in flight
NUM_SESSIONS = 4
ONE_PROCESSOR = ("--threads", "1")  # with more, head and stage would share the processors of this machine


async def compare_in_flight(repeats: int, num_tokens: int, hosts: Mapping[str, Host]) -> dict[str, Any]:
    """Let both targets answer the same four prompts at a time, in turn; figures of all repeats but the first."""
    ensure_demonstration()
    model = ["--model", str(demonstration_folder()), *MODEL, *ONE_PROCESSOR]
    prompts = [ChatPrompt((Message("user", text),)) for text in load_prompts()]
    speeds, unequal = defaultdict[int, list[float]](list), 0
    async with AsyncExitStack() as stack:
        clients = {}
        for number, names in HOSTS.items():
            target = [*model, *TARGET, "--sweeps-in-flight", str(number)]
            settings = settings_of(target, [*model, "--drop-layers", SUBSTITUTE_DROPS])
            members = [hosts[name] for name in names]
            cluster = await stack.enter_async_context(served(settings, members, NETWORKS[FAST]))
            clients[number] = await stack.enter_async_context(Client(cluster.address))
        for repeat in range(-1, repeats):
            some = [prompts[(repeat * NUM_SESSIONS + i) % len(prompts)] for i in range(NUM_SESSIONS)]
            texts = []
            for number in sorted(clients, reverse=repeat % 2 == 1):
                began = time.monotonic()
                options = GenerateOptions(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
                answers = await asyncio.gather(*(stream(clients[number], prompt, options) for prompt in some))
                if repeat >= 0:
                    speeds[number].append(NUM_SESSIONS * num_tokens / (time.monotonic() - began))
                texts.append([answer.token_ids for answer in answers])
            unequal += texts[0] != texts[1]
    ratios = [two / one for one, two in zip(speeds[1], speeds[2], strict=True)]
    return {
        "two_in_flight_over_one": round(geomean(ratios), 3),
        "tokens_per_second_in_flight": {number: round(geomean(each), 2) for number, each in speeds.items()},
        "unequal_in_flight": unequal,
    }
