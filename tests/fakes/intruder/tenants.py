"""Attempts of a tenant with a valid key to access another's sessions, requests and prompts."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import NamedTuple

import grpc
import httpx

from bough.client import Client
from bough.errors import BoughError
from bough.protocol import codec_generation
from bough.protocol.generation import Finished, GenerateOptions, Prompt, Resume, TokenPrompt, Tokens
from bough.rpc.server import open_channel
from bough.rpc.services import GENERATION, stub_of
from bough.rpc.status_map import to_error
from tests.fakes.intruder.callers import bearer
from tests.fakes.intruder.strangers import Secrets
from tests.fakes.intruder.tally import Tally

_SAMPLE = re.compile(r"^([\w:]+)\{[^}]*\} (\S+)$", re.MULTILINE)  # a line of Prometheus's text format
UNKNOWN = ("NotFound", "InvalidRequest", "404", "400")  # as for a name that never existed
SESSION, REQUEST = "s-alice", "r-alice"
BLOCKS, BLOCK_TOKENS = 20, 32
NEW = "read from its beginning"  # outcome if nothing reveals that another tenant has sent the prompt


def prompt_of(number: int) -> TokenPrompt:
    """A long prompt with a unique beginning for each number."""
    return TokenPrompt(tuple(3 + (number * 7 + place) % 200 for place in range(BLOCKS * BLOCK_TOKENS)))


class Read(NamedTuple):
    """Cached tokens that a request reports, and the target's work for it."""

    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int  # context tokens computed by the target
    swept_tokens: int
    sweeps: int


class Work(NamedTuple):
    """A target's work since its start."""

    computed_tokens: int
    swept_tokens: int
    sweeps: int

    @classmethod
    async def now(cls, url: str) -> Work:
        """Read the target's metrics."""
        async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
            text = (await client.get(url)).text
        totals = dict(_SAMPLE.findall(text))
        computed = float(totals["vllm:prefix_cache_queries_total"]) - float(totals["vllm:prefix_cache_hits_total"])
        swept, sweeps = float(totals["bough_sweep_tokens_total"]), float(totals["bough_sweeps_total"])
        return cls(round(computed), round(swept), round(sweeps))

    def since(self, before: Work) -> Work:
        """The work since an earlier reading."""
        return Work(*(now - then for now, then in zip(self, before, strict=True)))


@dataclass(frozen=True, slots=True)
class Endpoints:
    """The addresses of the APIs, and of the target's metrics, which only operators see."""

    grpc: str
    http: str
    figures: str
    secrets: Secrets

    def client(self, key: str) -> Client:
        """A client without resuming and retries."""
        return Client(self.grpc, patience_seconds=0.0, api_key=key)

    async def read(self, key: str, prompt: Prompt, options: GenerateOptions) -> Read:
        """Request one token while nothing else runs. Raises BoughError."""
        before = await Work.now(self.figures)
        told = await self.told(key, prompt, options)
        return Read(*told, *(await Work.now(self.figures)).since(before))

    async def told(self, key: str, prompt: Prompt, options: GenerateOptions) -> tuple[int, int]:
        """Number of prompt tokens and of cached ones. Raises BoughError."""
        async with self.client(key) as client:
            events = [event async for event in client.generate(prompt, options)]
        assert isinstance(events[-1], Finished)
        return events[-1].usage.prompt_tokens, events[-1].usage.cached_tokens

    async def raw(self, key: str, prompt: Prompt, options: GenerateOptions) -> None:
        """Make a call without the client's checks. Raises BoughError."""
        async with open_channel(self.grpc) as channel:
            stub = stub_of(GENERATION, channel)
            message = codec_generation.request_to_wire(prompt, options)
            try:
                async for _ in stub.Generate(message, metadata=tuple(bearer(key)), timeout=60):
                    return
            except grpc.aio.AioRpcError as exc:
                raise to_error(exc, self.grpc) from exc


async def outcome_of(call: Awaitable[object]) -> str:
    """The name of a call's error, or OK."""
    try:
        await call
    except BoughError as exc:
        return type(exc).__name__
    return "OK"


async def try_names(tally: Tally, endpoints: Endpoints) -> None:
    """Bob tries all calls that take a name while Alice's request runs; nothing of hers may change."""
    options = GenerateOptions(
        request_id=REQUEST, session_id=SESSION, max_tokens=400, seed=5, temperature=0.7, ignore_eos=True
    )
    async with endpoints.client(endpoints.secrets.alice) as alice, endpoints.client(endpoints.secrets.bob) as bob:
        async with aclosing(alice.generate(prompt_of(1), options)) as events:
            seen = [await anext(events), await anext(events)]
            await _at_grpc(tally, endpoints, bob)
            await _at_http(tally, endpoints)
            seen += [event async for event in events]
        tokens = sum(len(event.token_ids) for event in seen if isinstance(event, Tokens))
        ends = [event.finish_reason for event in seen if isinstance(event, Finished)]
        tally.control("Alice's request goes on to its end", f"{tokens} {ends}", ["400 ['length']"])
        await _at_grpc(tally, endpoints, bob)
        await _at_http(tally, endpoints)
        more = replace(options, request_id="", continues=True, max_tokens=1)
        tally.control(
            "Alice goes on", await outcome_of(endpoints.raw(endpoints.secrets.alice, TokenPrompt((5,)), more)), ["OK"]
        )
        tally.control("Alice sees why", await outcome_of(alice.decisions(SESSION)), ["OK"])
        tally.control("Alice closes", await outcome_of(alice.close_session(SESSION)), ["OK"])


def _spelled(name: str) -> list[str]:
    """Variants of a name that might be mapped to another tenant's."""
    return [name, f"alice::{name}", f"::{name}", f"bob::alice::{name}", f"../alice::{name}", f"alice:{name}", "alice::"]


async def _at_grpc(tally: Tally, endpoints: Endpoints, bob: Client) -> None:
    for session, request in zip(_spelled(SESSION), _spelled(REQUEST), strict=True):
        more = GenerateOptions(session_id=session, continues=True, max_tokens=1, seed=5)
        again = GenerateOptions(
            request_id=request, max_tokens=400, seed=5, temperature=0.7, ignore_eos=True, resume=Resume(1)
        )
        calls: list[tuple[str, Awaitable[object]]] = [
            (f"Abort {request}", bob.abort(request)),
            (f"CloseSession {session}", bob.close_session(session)),
            (f"GetDecisions {request}", bob.decisions(request)),
            (f"GetDecisions {session}", bob.decisions(session)),
            (f"continue {session}", endpoints.raw(endpoints.secrets.bob, TokenPrompt((5,)), more)),
            (f"resume {request}", endpoints.raw(endpoints.secrets.bob, prompt_of(1), again)),
        ]
        for what, call in calls:
            tally.attempt(f"Bob: {what}", await outcome_of(call), UNKNOWN)


async def _at_http(tally: Tally, endpoints: Endpoints) -> None:
    headers = dict(bearer(endpoints.secrets.bob))
    async with httpx.AsyncClient(base_url=endpoints.http, timeout=60, trust_env=False, headers=headers) as client:
        for name in (*_spelled(REQUEST), *_spelled(SESSION)):
            response = await client.get(f"/decisions/{name}")
            tally.attempt(f"Bob: GET /decisions/{name}", str(response.status_code), UNKNOWN)


async def try_prompts(tally: Tally, endpoints: Endpoints) -> None:
    """Bob sends Alice's prompts; reports and computed tokens must be as if they had not been sent before."""
    alice, bob = endpoints.secrets.alice, endpoints.secrets.bob
    options = GenerateOptions(max_tokens=1, temperature=0.0, ignore_eos=True)
    stranger = await endpoints.read(bob, prompt_of(2), options)
    for salt in ("", "alice::", "::", "salt"):
        mine = replace(options, cache_salt=salt)
        await endpoints.read(alice, prompt_of(3), mine)
        again = await endpoints.read(alice, prompt_of(3), mine)
        is_found = again.cached_tokens >= (BLOCKS - 1) * BLOCK_TOKENS and again.swept_tokens < stranger.swept_tokens
        tally.control(f"Alice's own prompt is found, salt {salt!r}", "found" if is_found else str(again), ["found"])
    for number, salt in enumerate(("", "alice::", "::", "salt", "alice::salt", "::salt", "bob::")):
        asked = replace(options, cache_salt=salt, session_id=f"guess-{number}")
        found = await endpoints.read(bob, prompt_of(3), asked)
        tally.attempt(f"Bob asks Alice's prompt, salt {salt!r}", NEW if found == stranger else str(found), [NEW])
        await _forget(endpoints, bob, asked)
    await _at_once(tally, endpoints, stranger)
    await _cached_over_http(tally, endpoints)


async def _forget(endpoints: Endpoints, key: str, options: GenerateOptions) -> None:
    """Delete Bob's own copy, which the next attempt would find."""
    async with endpoints.client(key) as client:
        await client.close_session(options.session_id)


async def _at_once(tally: Tally, endpoints: Endpoints, stranger: Read) -> None:
    """Both send the same prompt at once: concurrent requests may share no work either."""
    options = GenerateOptions(max_tokens=1, temperature=0.0, ignore_eos=True)
    before = await Work.now(endpoints.figures)
    found = await asyncio.gather(
        *(endpoints.told(key, prompt_of(4), options) for key in (endpoints.secrets.alice, endpoints.secrets.bob))
    )
    done = (await Work.now(endpoints.figures)).since(before)
    cached = sum(cached_tokens for _, cached_tokens in found)
    is_apart = cached == 0 and done.computed_tokens == 2 * stranger.computed_tokens
    tally.attempt("both ask the same at once", NEW if is_apart else f"{cached} cached, {done}", [NEW])


async def _cached_over_http(tally: Tally, endpoints: Endpoints) -> None:
    headers = dict(bearer(endpoints.secrets.bob))
    async with httpx.AsyncClient(base_url=endpoints.http, timeout=60, trust_env=False, headers=headers) as client:
        for number in (3, 1):
            body = {"prompt": prompt_of(number).token_ids, "max_tokens": 1, "cache_salt": f"http-{number}"}
            usage = (await client.post("/v1/completions", json=body)).json()["usage"]
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            tally.attempt(f"Bob asks Alice's prompt {number} over HTTP", str(cached), ["0"])
