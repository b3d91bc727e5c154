"""Sends malformed messages to an orchestrator in its own process, and monitors it."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

import httpx
import redis.asyncio

from bough.client import Client
from bough.errors import BoughError
from bough.processes.launch import INDEX
from bough.protocol.generation import GenerateOptions, TextPrompt, Tokens
from deploy.index import IndexServer
from loadtest.common.stacks import http_url_of
from loadtest.served.soak import Snapshot, leaks, snapshot
from loadtest.served.stack import Stack, stack, write_profile
from tests.fakes.certificates import Authority, flags_of
from tests.fakes.fuzz import grpc_port, http_port, other_protocols
from tests.fakes.fuzz.grpc_port import FrameSender, GrpcSender
from tests.fakes.fuzz.http_port import HttpSender
from tests.fakes.fuzz.mutation import Mutator
from tests.fakes.fuzz.ordinary import OF_WORKERS
from tests.fakes.fuzz.other_protocols import OtherProtocolSender, Trust, index_behind_tls
from tests.fakes.fuzz.outcomes import Outcomes

SWEEP_SECONDS = 0.001
MAX_CONTEXT = 48  # ends answers without a limit
MAX_NODES = 8  # of trees, which are no part of this
SHARES = {http_port.LAYER: 0.5, grpc_port.LAYER: 0.25, grpc_port.FRAMES: 0.1, other_protocols.LAYER: 0.05}
SHARES |= dict.fromkeys(OF_WORKERS, 0.05)
SENDERS = {http_port.LAYER: 24, grpc_port.LAYER: 6, grpc_port.FRAMES: 12, other_protocols.LAYER: 6}  # at once
SENDERS |= dict.fromkeys(OF_WORKERS, 2)
NUM_PROCESSES = 4
BATCH = 5000  # messages between two checks of the processes
SETTLE_SECONDS = 30.0
ERRORS = re.compile(r"^(?:.* (?:ERROR|CRITICAL) .*|\w[\w.]*(?:Error|Exception)\b.*)$", re.MULTILINE)
UNREADABLE = "grpc._cython.cygrpc: Invalid encoding"  # gRPC's line on a header that is no text, which it leaves out
PROMPT, MAX_TOKENS = "the ordinary request", 16


class Sender(Protocol):
    """Sends messages one after another."""

    async def send(self) -> None:
        """Send one message and record its outcome."""
        ...

    async def close(self) -> None:
        """Close the connections."""
        ...


@dataclass(frozen=True, slots=True)
class Ordinary:
    """A valid request over both APIs."""

    address: str
    url: str
    trust: Trust
    index: IndexServer | None  # besides that of the orchestrator, behind TLS

    async def tokens(self) -> tuple[list[int], str]:
        """Return the tokens over gRPC and the text over HTTP. Raises BoughError or httpx.HTTPError."""
        options = GenerateOptions(temperature=0.7, seed=11, max_tokens=MAX_TOKENS, ignore_eos=True)
        tokens: list[int] = []
        async with Client(self.address, certificates=self.trust.files) as client:
            async for event in client.generate(TextPrompt(PROMPT), options):
                tokens += event.token_ids if isinstance(event, Tokens) else ()
        body = {"prompt": PROMPT, "max_tokens": MAX_TOKENS, "temperature": 0.7, "seed": 11, "ignore_eos": True}
        async with httpx.AsyncClient(trust_env=False, timeout=60, verify=self.trust.http or False) as http:
            response = (await http.post(f"{self.url}/v1/completions", json=body)).raise_for_status()
        return tokens, response.json()["choices"][0]["text"]


async def at_sockets(folder: Path, num_messages: int, seed: int, *, has_tls: bool = False) -> Outcomes:
    """Send messages to an orchestrator with simulated workers.

    With `has_tls` these processes speak TLS alone, and most messages come inside of it.
    """
    outcomes = Outcomes()
    profile = write_profile(folder, SWEEP_SECONDS, max_context=MAX_CONTEXT, max_nodes=MAX_NODES)
    trust = Trust.of(Authority().files(folder)) if has_tls else Trust()
    flags = flags_of(trust.files) if trust.files else ()
    async with index_behind_tls(trust.files) as index, stack(profile, everywhere_flags=flags) as running:
        address = running.addresses("orchestrator")[0]
        ordinary = Ordinary(address, await http_url_of(address, trust.files), trust, index)
        wanted = await ordinary.tokens()
        first: Snapshot = {}
        num_batches = max(2, round(num_messages / BATCH))
        for batch in range(num_batches):
            size = num_messages * (batch + 1) // num_batches - num_messages * batch // num_batches
            await _send(running, ordinary, size, f"{seed} {batch}", outcomes)
            await _look(running, ordinary, wanted, outcomes.problems)
            if len(running.process_ids()) < NUM_PROCESSES:
                return outcomes
            if batch == num_batches // 10:
                first = await snapshot(running, ordinary.url, trust.http)
        outcomes.problems.update(_logged(running))
        outcomes.problems.update(await _everlasting(running))
        outcomes.problems.update(await _left(running, ordinary, first))
    return outcomes


def _to_worker(address: str, trust: Trust, outcomes: Outcomes, kind: str, mutator: Mutator) -> Sender:
    return GrpcSender(address, mutator, outcomes, kind, OF_WORKERS[kind], trust.credentials)


async def _send(running: Stack, ordinary: Ordinary, num_messages: int, seed: str, outcomes: Outcomes) -> None:
    trust = ordinary.trust
    credentials = trust.credentials
    ports = {address: trust.http2 for kind in running.replicas for address in running.addresses(kind)}
    ports |= {urlsplit(ordinary.url).netloc: trust.http, urlsplit(running.index_url).netloc: None}
    if ordinary.index is not None:
        ports[urlsplit(ordinary.index.place.url).netloc] = trust.http
    makes: dict[str, Callable[[Mutator], Sender]] = {
        http_port.LAYER: lambda mutator: HttpSender(ordinary.url, mutator, outcomes, trust.http),
        grpc_port.LAYER: lambda mutator: GrpcSender(ordinary.address, mutator, outcomes, credentials=credentials),
        grpc_port.FRAMES: lambda mutator: FrameSender(ordinary.address, mutator, outcomes, trust.http2),
        other_protocols.LAYER: lambda mutator: OtherProtocolSender(ports, mutator, outcomes),
        **{kind: partial(_to_worker, running.addresses(kind)[0], trust, outcomes, kind) for kind in OF_WORKERS},
    }

    async def go_on(layer: str, sender: Sender, most: int) -> None:
        while outcomes.counts[layer] < most:
            await sender.send()
        await sender.close()

    async with asyncio.TaskGroup() as group:
        for layer, share in SHARES.items():
            most = outcomes.counts[layer] + round(num_messages * share)
            for number in range(SENDERS[layer]):
                group.create_task(go_on(layer, makes[layer](Mutator(f"{seed} {number}")), most))


async def _look(running: Stack, ordinary: Ordinary, wanted: object, problems: Counter[str]) -> None:
    """Check that all processes run and that the valid request gets its tokens."""
    alive = running.process_ids()
    if INDEX not in alive:
        problems["the index has ended"] += 1
    for kind, replicas in running.replicas.items():
        for child, _ in replicas:
            if child.name not in alive:
                problems[f"the {kind} has ended: {child.tail()[-3000:]}"] += 1
    try:
        if ordinary.index is not None:
            await ordinary.index.check()
    except BoughError as exc:
        problems[f"the index behind TLS: {exc}"] += 1
    try:
        if await ordinary.tokens() != wanted:
            problems["the ordinary request has other tokens"] += 1
    except (BoughError, httpx.HTTPError) as exc:
        problems[f"the ordinary request: {type(exc).__name__}: {exc}"] += 1


def _logged(running: Stack) -> Counter[str]:
    """Errors in the processes' logs: what goes wrong without showing in a status."""
    logs = {
        child.name: child.log.read_text(errors="replace") for kind in running.replicas.values() for child, _ in kind
    }
    lines = ((name, line) for name, text in logs.items() for line in ERRORS.findall(text) if UNREADABLE not in line)
    return Counter(f"the log of {name}: {line[:200]}" for name, line in lines)


async def _everlasting(running: Stack) -> Counter[str]:
    """Records of sessions and requests in the index that do not expire by themselves."""
    async with redis.asyncio.Redis.from_url(running.index_url) as index:
        names = [name.decode(errors="replace") async for name in index.scan_iter(count=1000)]
        return Counter([re.sub(r"[^:]*$", "*", n) for n in names if await index.ttl(n) == -1])


async def _left(running: Stack, ordinary: Ordinary, first: Snapshot) -> list[str]:
    """Growth that remains after closed connections are cleaned up, which is a leak."""
    too_much: list[str] = []
    with suppress(TimeoutError):
        async with asyncio.timeout(SETTLE_SECONDS):
            while True:
                growth = _growth(first, await snapshot(running, ordinary.url, ordinary.trust.http))
                # What the index keeps of messages has bounds of its own, and expires (`_everlasting`).
                too_much = leaks({name: each for name, each in growth.items() if name != "index"})
                if not too_much:
                    break
                await asyncio.sleep(1.0)
    return too_much


def _growth(first: Snapshot, now: Snapshot) -> Snapshot:
    return {
        name: {figure: value - first[name][figure] for figure, value in figures.items() if figure in first[name]}
        for name, figures in now.items()
        if name in first
    }
