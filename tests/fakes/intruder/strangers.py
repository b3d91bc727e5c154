"""Attempts without a key, and with wrong, expired, removed or badly presented keys, at every method."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import quote

import httpx

from bough.rpc.server import open_channel
from bough.security.keys import HEADER, hash_of, new_key
from tests.fakes.intruder.callers import PATHS, SERVICES, Headers, bearer, grpc_outcome, http_outcome
from tests.fakes.intruder.tally import Tally

REFUSED_GRPC = ("UNAUTHENTICATED",)
NOT_THERE = ("UNIMPLEMENTED",)  # of methods that do not exist
REFUSED_HTTP = ("401",)
# Monitoring methods without tenants' data, which the workers' secret may call.
OF_OPERATORS = ("GetModelInfo", "GetServerInfo", "GetLoads", "GetAcceptance", "ServerReflectionInfo", "Other", "other")


@dataclass(frozen=True, slots=True)
class Secrets:
    """The secrets of the system under attack."""

    alice: str
    bob: str
    expired: str
    removed: str
    worker: str


def forged(key: str) -> Mapping[str, Headers]:
    """Invalid presentations of keys, all of which must be refused."""
    encoded = base64.b64encode(f"alice:{key}".encode()).decode()
    return {
        "nothing": [],
        "an empty header": [(HEADER, "")],
        "a scheme alone": [(HEADER, "Bearer")],
        "no scheme": [(HEADER, key)],
        "another scheme": [(HEADER, f"Token {key}")],
        "basic": [(HEADER, f"Basic {encoded}")],
        "somebody's key": bearer(new_key()),
        "all but the last character": bearer(key[:-1]),
        "one character more": bearer(key + "A"),
        "another case": bearer(key.swapcase()),
        "its hash": bearer(hash_of(key)),
        "a pattern": bearer("*"),
        "a name": bearer("alice"),
        "two headers": [*bearer(key), *bearer(new_key())],
        "two keys": bearer(f"{key}, Bearer {new_key()}"),
        "a long key": bearer(key + "A" * 1000),
        "another header": [("x-api-key", key), ("proxy-authorization", f"Bearer {key}"), ("api-key", key)],
        "a cookie": [("cookie", f"authorization=Bearer {key}; api_key={key}")],
    }


async def at_grpc(tally: Tally, addresses: Mapping[str, str], secrets: Secrets) -> None:
    """Attempt all methods of all services."""
    keys = {"orchestrator": secrets.alice, "target": secrets.worker, "draft": secrets.worker}
    for kind, address in addresses.items():
        shown = dict(forged(keys[kind]))
        shown |= {"an expired key": bearer(secrets.expired), "a removed key": bearer(secrets.removed)}
        if kind != "orchestrator":
            shown["a tenant's key"] = bearer(secrets.alice)
        async with open_channel(address) as channel:
            for call in SERVICES[kind]:
                for how, headers in shown.items():
                    what = f"{kind} {call.method} with {how}"
                    is_there = not call.method.lower().endswith("/other")
                    refusals = REFUSED_GRPC if is_there else NOT_THERE
                    await tally.attempted(what, grpc_outcome(channel, call, headers), refusals)
            if kind == "orchestrator":
                await _with_the_workers_secret(tally, address, secrets)


async def _with_the_workers_secret(tally: Tally, address: str, secrets: Secrets) -> None:
    """Check that the workers' secret may monitor, but not access tenants' data."""
    async with open_channel(address) as channel:
        for call in SERVICES["orchestrator"]:
            outcome = await grpc_outcome(channel, call, bearer(secrets.worker))
            name = call.method.rpartition("/")[2]
            if name not in OF_OPERATORS:
                tally.attempt(f"orchestrator {call.method} with the workers' secret", outcome, REFUSED_GRPC)


async def at_http(tally: Tally, url: str, secrets: Secrets, transport: httpx.AsyncBaseTransport | None = None) -> None:
    """Attempt all HTTP paths except health; over sockets, unless by another transport."""
    shown = {
        **forged(secrets.alice),
        "an expired key": bearer(secrets.expired),
        "a removed key": bearer(secrets.removed),
        "the workers' secret": bearer(secrets.worker),
        "characters that are none": [(HEADER, "Bearer \xff\xfe")],
    }
    async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False, transport=transport) as client:
        for method, path in PATHS:
            for how, headers in shown.items():
                outcome = http_outcome(client, method, path, headers)
                await tally.attempted(f"{method} {path} with {how}", outcome, REFUSED_HTTP)
            for query in (f"?api_key={secrets.alice}", f"?{HEADER}={quote('Bearer ' + secrets.alice)}"):
                outcome = http_outcome(client, method, path, query=query)
                await tally.attempted(f"{method} {path} with a query", outcome, REFUSED_HTTP)


async def controls(tally: Tally, addresses: Mapping[str, str], url: str, secrets: Secrets) -> None:
    """Check that valid keys are accepted."""
    for kind, key in (("orchestrator", secrets.alice), ("target", secrets.worker), ("draft", secrets.worker)):
        async with open_channel(addresses[kind]) as channel:
            for call in SERVICES[kind]:
                outcome = await grpc_outcome(channel, call, bearer(key))
                is_let_in = outcome not in (*REFUSED_GRPC, "UNAVAILABLE", "INTERNAL", "DEADLINE_EXCEEDED")
                tally.control(f"{kind} {call.method}", outcome, [outcome] if is_let_in else [])
    async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as client:
        paths = ("/v1/completions", "/v1/chat/completions", "/v1/responses")
        for method, path in (*(("POST", path) for path in paths), ("GET", "/v1/models")):
            outcome = await http_outcome(client, method, path, bearer(secrets.bob))
            tally.control(f"{method} {path}", outcome, ["200"])
