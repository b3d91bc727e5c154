"""Tests rolling restarts under load: no request may fail, and every text must equal that of an undisturbed run."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bough.client import Client
from bough.errors import BoughError
from bough.protocol.generation import ChatPrompt, GenerateOptions, Message
from loadtest.common.streams import stream
from loadtest.served.stack import stack, write_profile

SWEEP_SECONDS = 0.1
ANSWER_TOKENS = 96
REPLICAS = 2
PAUSE_SECONDS = 1.0  # between restarts


async def answer(client: Client, number: int) -> list[int]:
    """The tokens of the request with this number."""
    prompt = ChatPrompt((Message("user", f"question {number}"),))
    options = GenerateOptions(seed=number, max_tokens=ANSWER_TOKENS, ignore_eos=True)
    return (await stream(client, prompt, options)).token_ids


async def restarts(streams: int, num_prompts: int) -> dict[str, Any]:
    """Replace orchestrators, drafts and targets one after another under the load of `streams` clients."""
    failures: list[str] = []
    unequal = num_answers = 0
    is_over = asyncio.Event()
    with TemporaryDirectory() as folder:
        async with stack(write_profile(Path(folder), SWEEP_SECONDS), replicas=REPLICAS) as running:
            async with Client(*running.addresses("orchestrator")) as client:
                expected = [await answer(client, number) for number in range(num_prompts)]

            async def live(first: int) -> None:
                nonlocal unequal, num_answers
                number = first
                while not is_over.is_set():
                    addresses = running.addresses("orchestrator")  # as from a service lookup
                    async with Client(*addresses) as own:
                        try:
                            got = await answer(own, number % num_prompts)
                        except BoughError as exc:
                            failures.append(f"{type(exc).__name__}: {exc}")
                            continue
                    num_answers += 1
                    unequal += got != expected[number % num_prompts]
                    number += 1

            clients = [asyncio.create_task(live(first)) for first in range(streams)]
            began, statuses = time.monotonic(), []
            for kind in ("orchestrator", "draft", "target") * REPLICAS:
                await asyncio.sleep(PAUSE_SECONDS)
                await running.add(kind)
                statuses.append(await running.retire(kind))
            await asyncio.sleep(PAUSE_SECONDS)
            is_over.set()
            await asyncio.gather(*clients)
    return {
        "restarted": len(statuses),
        "exit_statuses": sorted(set(statuses)),
        "bad_exits": sum(status != 0 for status in statuses),  # processes that did not end as they were asked to
        "answers": num_answers,
        "failed": len(failures),
        "failures": sorted(set(failures))[:5],
        "unequal": unequal,
        "seconds": round(time.monotonic() - began, 1),
    }
