"""Measures one regime with real models: contestants take turns prompt by prompt. Prints one JSON line.

The sizer's orchestrator serves only self-sized rounds; a second one with the same workers serves fixed sizes and plain
decoding. Seconds per token are compared without the first round of each answer, which also reads the prompt. Plain
decoding takes equally long for every token, so fewer of its tokens are timed.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import statistics
import sys
import time
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from bough.client import Client
from bough.config.cache_paths import demonstration_folder
from bough.config.processes import OrchestratorConfig, to_flags
from bough.errors import BoughError
from bough.model.checkpoint.model_places import load_tokenizer_files
from bough.processes.demonstration import ensure_demonstration
from bough.processes.exit_with_parent import MODULE
from bough.processes.launch import Cluster, launched
from bough.protocol.decision import Decision
from bough.protocol.generation import GenerateOptions, Speculation, TokenPrompt
from bough.registry.records import WorkerRecord
from bough.registry.registry import Registry
from bough.tokenization.tokenizer import Tokenizer
from loadtest.common.prompts import load_prompts
from loadtest.common.stacks import settings_of
from loadtest.common.streams import Stream, stream
from loadtest.regret.real import Measured, RealRegime, Scale, Task
from loadtest.regret.scoring import round_time_error, token_error

WARM_TOKENS = 4
HALF_TOKENS = 6  # half of the tokens that plain decoding generates; the disturbance begins after them
OTHER = "orchestrator of fixed sizes"


@asynccontextmanager
async def second_orchestrator(cluster: Cluster, config: OrchestratorConfig) -> AsyncIterator[Client]:
    """Start a second orchestrator with the same workers; it ends with the cluster."""
    known = {worker.address for worker in (await _records(cluster))}
    flags = to_flags(replace(config, index_url=cluster.index_url))
    cluster.start(OTHER, [sys.executable, *MODULE, "orchestrator", *flags])
    while not (new := [record for record in await _records(cluster) if record.address not in known]):
        await asyncio.sleep(0.1)
    async with Client(new[0].address) as client:
        while True:
            try:
                if len((await client.server_info()).workers) == len(("target", "draft")):
                    break
            except BoughError:
                pass
            await asyncio.sleep(0.1)
        yield client


async def _records(cluster: Cluster) -> list[WorkerRecord]:
    registry = Registry(cluster.index_url, cluster.settings.target.namespace)
    try:
        return list(await registry.workers())
    finally:
        await registry.close()


class Bench:
    """Measures one regime."""

    def __init__(self, task: Task, own: Client, other: Client) -> None:
        self.task, self._own, self._other = task, own, other
        tokenizer = Tokenizer(load_tokenizer_files(Path(demonstration_folder())))
        texts = load_prompts()[task.scale.seed :]
        self.prompts = [TokenPrompt(tuple(tokenizer.encode_chat([("user", text)]))) for text in texts]
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.num_unequal = 0
        self.sizes: list[int] = []
        self.decisions: list[Decision] = []

    async def run(self) -> Measured:
        """Run every contestant on every prompt, in rotating order."""
        grid = self.task.regime.grid
        contestants = {"self": Speculation(), "off": Speculation(disabled=True)}
        contestants |= {
            f"{nodes} nodes, depth {depth}": Speculation(budget=nodes, depth=depth) for nodes, depth in grid
        }
        for client in (self._own, self._other):
            await stream(client, self.prompts[0], GenerateOptions(temperature=0.0, max_tokens=WARM_TOKENS))
        names, scale = list(contestants), self.task.scale
        num_groups = len(self.prompts) // self.task.regime.num_sessions
        num_prompts = min(scale.num_prompts, num_groups)
        for number in range(num_prompts):
            plain: list[Stream] = []
            others: list[list[Stream]] = []
            turn = number % len(names)
            for name in (*names[turn:], *names[:turn]):
                answers = await self._answers(name, contestants[name], number)
                self.seconds[name].append(sum(answer.seconds_a_token for answer in answers) / len(answers))
                if name == "off":
                    plain = answers
                else:
                    others.append(answers)
                if name == "self":
                    self.sizes += [tokens.num_nodes for answer in answers for _, tokens in answer.rounds[1:]]
            self.num_unequal += sum(
                _is_unequal(one, its) for each in others for one, its in zip(each, plain, strict=True)
            )
        for number in range(num_prompts, min(num_prompts + scale.more_prompts, num_groups)):
            await self._answers("self", contestants["self"], number)
        return self._measured()

    async def _answers(self, name: str, speculation: Speculation, number: int) -> list[Stream]:
        """Answers to as many prompts at once as the regime has sessions."""
        task = self.task
        client = self._own if name == "self" else self._other
        num_tokens = task.scale.plain_tokens if name == "off" else task.scale.num_tokens
        options = GenerateOptions(
            temperature=task.regime.temperature,
            seed=number,
            max_tokens=num_tokens,
            ignore_eos=True,
            speculation=speculation,
        )
        first = number * task.regime.num_sessions
        prompts = self.prompts[first : first + task.regime.num_sessions]
        disturbing = asyncio.create_task(_disturb(client, self.task.regime.is_disturbed))
        try:
            requests = [replace(options, request_id=uuid.uuid4().hex) for _ in prompts]
            answers = list(await asyncio.gather(*map(partial(stream, client), prompts, requests)))
        finally:
            disturbing.cancel()
            await asyncio.wait({disturbing})
        if name == "self":
            for request in requests:
                self.decisions += await client.decisions(request.request_id)
        return answers

    def _measured(self) -> Measured:
        fixed = {name: tuple(seconds) for name, seconds in self.seconds.items() if name not in ("self", "off")}
        return Measured(
            tuple(self.seconds["self"]),
            fixed,
            tuple(self.seconds["off"]),
            self.num_unequal,
            tuple(self.sizes),
            round_time_error(self.decisions),
            token_error(self.decisions),
            {
                "orchestrator_seconds": round(statistics.median([d.seconds.other for d in self.decisions]), 5),
                "load_average": round(os.getloadavg()[0], 1),
            },
        )


async def _disturb(client: Client, is_wanted: bool) -> None:
    """Start a process that uses one processor, after a few rounds; it ends when this task is cancelled."""
    if not is_wanted:
        return
    began = (await client.loads()).num_tokens_total
    while (await client.loads()).num_tokens_total < began + HALF_TOKENS:
        await asyncio.sleep(0.1)
    process = multiprocessing.get_context("spawn").Process(target=_spin, daemon=True)
    process.start()
    try:
        await asyncio.Event().wait()
    finally:
        process.kill()
        process.join()


def _spin() -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    while True:
        pass


def _is_unequal(one: Stream, plain: Stream) -> bool:
    num = min(len(one.token_ids), len(plain.token_ids))
    return one.token_ids[:num] != plain.token_ids[:num]


async def measure(task: Task) -> Measured:
    """Start everything, measure, and end everything."""
    ensure_demonstration()
    model = ["--model", str(demonstration_folder())]
    settings = settings_of([*model, *task.regime.target_flags], [*model, *task.regime.draft_flags])
    fixed = replace(settings.orchestrator, planner="fixed")
    async with (
        launched(settings, lambda _: None) as cluster,
        Client(cluster.address) as own,
        second_orchestrator(cluster, fixed) as other,
    ):
        return await Bench(task, own, other).run()


def _task_from(text: str) -> Task:
    values = json.loads(text)
    regime = values.pop("regime")
    for name in ("target_flags", "draft_flags"):
        regime[name] = tuple(regime[name])
    regime["grid"] = tuple(map(tuple, regime["grid"]))
    return Task(RealRegime(**regime), Scale(**values["scale"]))


def main() -> None:
    """Measure and print one JSON line last."""
    began = time.monotonic()
    measured = asyncio.run(measure(_task_from(sys.argv[1])))
    values = asdict(measured)
    values["facts"]["seconds"] = round(time.monotonic() - began)
    print(json.dumps(values))


if __name__ == "__main__":
    main()
