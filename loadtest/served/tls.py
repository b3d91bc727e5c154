"""Measures what TLS adds to a call between processes.

    python -m loadtest.served.tls --calls 2000 --machine "two cores of a Zen 4"

One process is both ends, so that what both compute is counted: plain text, TLS, and TLS that asks for a certificate and
its name. Each turn calls all three, in an order that is drawn, with as many bytes as a round's call to a target has (a
tree of 64 nodes and its answer), over connections that are open. Ends with one JSON line:

plain_us        median of a call in plain text
added_us        medians of what the same turn's other calls took longer, by door: `tls`, `mutual`; with 95 % intervals
handshake_ms    median of a new connection's first call, by door
share_of_round  `mutual` twice (a draft's call and a target's), over a round of --round-seconds
"""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from statistics import median
from typing import cast

import grpc

from bough.config.flag_parser import FlagParser
from bough.rpc.server import open_channel, serving
from bough.security.access import Access
from bough.security.certificates import CertificateFiles
from bough.security.tls import Tls
from loadtest.common.certificates import Authority
from loadtest.common.ratios import interval

REQUEST_BYTES, REPLY_BYTES = 1500, 600
METHOD = "/bough.tests.Echo/Call"
PLAIN, DOORS = "plain", ("tls", "mutual")
HANDSHAKES = 20
WARM_UP_CALLS = 200


@asynccontextmanager
async def doors(files: CertificateFiles) -> AsyncIterator[dict[str, int]]:
    """Serve all variants in this process; yields their ports."""
    access = Access(tls=Tls(files, is_server=True), peer_names=("process",))
    credentials = {PLAIN: None, "tls": access.api_credentials, "mutual": access.worker_credentials}
    async with AsyncExitStack() as stack:
        ports = {}
        for name, own in credentials.items():
            keepers = access.auth_interceptors if name == "mutual" else ()
            serves = serving("127.0.0.1", 0, METHOD.split("/")[1], _add, auth_interceptors=keepers, credentials=own)
            ports[name] = (await stack.enter_async_context(serves)).port
        yield ports


def _add(server: grpc.aio.Server) -> None:
    async def answer(*_: object) -> bytes:
        return bytes(REPLY_BYTES)

    service, method = METHOD.split("/")[1:]
    handlers = {method: grpc.unary_unary_rpc_method_handler(answer, lambda data: data, lambda data: data)}
    server.add_registered_method_handlers(service, handlers)


async def _timed(channel: grpc.aio.Channel) -> float:
    """Seconds that a call takes."""
    call = cast(Callable[[bytes], Awaitable[bytes]], channel.unary_unary(METHOD))
    began = time.perf_counter()
    await call(bytes(REQUEST_BYTES))
    return time.perf_counter() - began


async def measure(num_calls: int, seed: int) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Seconds of calls, and of first calls over new connections, by variant and turn."""
    drawn = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        files = Authority().files(Path(folder))
        opened, known = Tls(files), Tls(CertificateFiles(authority=files.authority))
        credentials = {PLAIN: None, "tls": known.channel_credentials(), "mutual": opened.channel_credentials()}
        async with doors(files) as ports, AsyncExitStack() as stack:
            addresses = {name: f"127.0.0.1:{port}" for name, port in ports.items()}
            first: dict[str, list[float]] = {name: [] for name in addresses}
            for _ in range(HANDSHAKES):
                for name in drawn.sample(list(addresses), len(addresses)):
                    async with open_channel(addresses[name], credentials[name]) as channel:
                        first[name].append(await _timed(channel))
            channels = {
                name: await stack.enter_async_context(open_channel(address, credentials[name]))
                for name, address in addresses.items()
            }
            calls: dict[str, list[float]] = {name: [] for name in channels}
            for turn in range(WARM_UP_CALLS + num_calls):
                for name in drawn.sample(list(channels), len(channels)):
                    seconds = await _timed(channels[name])
                    if turn >= WARM_UP_CALLS:
                        calls[name].append(seconds)
    return calls, first


def summary(
    calls: Mapping[str, Sequence[float]], first: Mapping[str, Sequence[float]], round_seconds: float, seed: int
) -> dict[str, object]:
    """The figures of the JSON line."""
    added = {
        name: [1e6 * (seconds - plain) for seconds, plain in zip(calls[name], calls[PLAIN], strict=True)]
        for name in DOORS
    }
    return {
        "plain_us": round(1e6 * median(calls[PLAIN])),
        "added_us": {
            name: {"median": round(median(each)), "interval": interval(each, median, seed, 0)}
            for name, each in added.items()
        },
        "handshake_ms": {name: round(1e3 * median(each), 2) for name, each in first.items()},
        "share_of_round": round(2e-6 * median(added["mutual"]) / round_seconds, 6),
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = FlagParser(prog="loadtest.served.tls", description=__doc__)
    parser.add_argument("--calls", type=int, default=2000, help="turns (default 2000)")
    parser.add_argument("--round-seconds", type=float, default=0.5, help="of a round, for its share (default 0.5)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--machine", default="", help="what it ran on, for the line")
    arguments = parser.parse_args(argv)
    calls, first = asyncio.run(measure(arguments.calls, arguments.seed))
    told = summary(calls, first, arguments.round_seconds, arguments.seed)
    print(json.dumps(told | {"calls": arguments.calls, "machine": arguments.machine}))


if __name__ == "__main__":
    main()
