"""Compares gRPC with torch.distributed's gloo between two network namespaces. Needs root.

    python -m loadtest.stages.carriers

A head sends messages, and a stage returns them. Then the network is cut silently, mostly during a message of 8 MB. Ends
with one JSON line, by carrier: milliseconds of a round trip by size (median, minimum), `error_seconds` from the last
answer to the error, and `back_seconds` from the network's return to an answer in the same processes (null: none).
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import grpc
import torch
import torch.distributed as dist

from bough.config.flag_parser import FlagParser
from loadtest.cluster.hosts import hosts
from loadtest.common.machine import processor

SIZES = {4 << 10: 300, 1 << 20: 60, 8 << 20: 20}  # bytes of a message: number of round trips
DEADLINE_SECONDS = 5.0  # of a message
CUT_SECONDS, BACK_SECONDS = 15.0, 40.0  # BACK_SECONDS: limit until an answer after the network's return
OPTIONS = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_reconnect_backoff_ms", 2000),
    ("grpc.use_local_subchannel_pool", 1),  # otherwise a new channel waits for the old one's lost connection
]
FAULTS = (RuntimeError, TimeoutError, grpc.RpcError)
Exchange = Callable[[bytes], None]  # a round trip


def serve_grpc(address: str) -> None:
    """Return each message of each stream."""
    server = grpc.server(ThreadPoolExecutor(8), options=OPTIONS)
    echo: Any = grpc.stream_stream_rpc_method_handler(lambda messages, _: messages)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("Stage", {"Echo": echo}),))
    server.add_insecure_port(address)
    server.start()
    server.wait_for_termination()


def open_grpc(address: str, runner: asyncio.Runner) -> Exchange:
    """A stream to the stage, on a channel of its own."""

    async def opened() -> Any:
        return grpc.aio.insecure_channel(address, options=OPTIONS).stream_stream("/Stage/Echo")(wait_for_ready=True)

    async def exchange(payload: bytes) -> None:
        async with asyncio.timeout(DEADLINE_SECONDS):
            await call.write(payload)
            assert await call.read() == payload

    call = runner.run(opened())
    return lambda payload: runner.run(exchange(payload))


def open_gloo(address: str, rank: int) -> Exchange:
    """Create the group of head (rank 0, at this address) and stage, in place of an earlier one."""
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    if dist.is_initialized():
        dist.destroy_process_group()
    limit = timedelta(seconds=DEADLINE_SECONDS)
    dist.init_process_group("gloo", init_method=f"tcp://{address}", rank=rank, world_size=2, timeout=limit)

    def exchange(payload: bytes) -> None:
        sent = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        received = torch.empty_like(sent)
        if rank == 0:
            dist.send(sent, 1)
            dist.recv(received, 1)
        else:
            dist.recv(received, 0)
            dist.send(received, 0)

    return exchange


def run_head(open_exchange: Callable[[], Exchange]) -> None:
    """Measure round trips; then send until the cut, and until answers come again. A stage of gloo takes part alike."""
    exchange, milliseconds = open_exchange(), {}
    for size, count in SIZES.items():
        seconds = []
        for _ in range(count):
            began = time.perf_counter()
            exchange(bytes(size))
            seconds.append(time.perf_counter() - began)
        milliseconds[f"{size >> 10}_KB"] = [round(1e3 * f(seconds), 2) for f in (statistics.median, min)]
    print(json.dumps({"milliseconds": milliseconds}), flush=True)
    answered, failed_at = time.time(), 0.0
    while True:
        try:
            exchange = open_exchange() if failed_at else exchange
            while True:
                exchange(bytes(8 << 20))
                if failed_at:
                    print(json.dumps({"back_at": time.time()}), flush=True)
                answered, failed_at = time.time(), 0.0
        except FAULTS as exc:
            if not failed_at:
                error = {"error_seconds": round(time.time() - answered, 1), "error": f"{type(exc).__name__}: {exc}"}
                print(json.dumps(error), flush=True)
            failed_at = time.time()


def compare(carrier: str, folder: Path) -> dict[str, Any]:
    """Run head and stage on two hosts and cut the stage off."""
    log = folder / f"{carrier}.log"

    def wait(key: str, seconds: float) -> dict[str, Any]:
        until, found = time.monotonic() + seconds, {}
        while key not in found and time.monotonic() < until:
            time.sleep(0.05)
            lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
            found = {name: value for line in reversed(lines) for name, value in line.items()}
        return found

    with hosts("head", "stage") as made:
        address = made["stage" if carrier == "grpc" else "head"].address + ":7000"
        command = [sys.executable, "-m", "loadtest.stages.carriers", "--carrier", carrier, "--address", address]
        for role in ("stage", "head"):
            made[role].start([*command, "--role", role], log if role == "head" else folder / "stage.log")
        wait("milliseconds", 120)
        time.sleep(1)
        made["stage"].cut_off()
        time.sleep(CUT_SECONDS)
        made["stage"].bring_back()
        returned = time.time()
        found = wait("back_at", BACK_SECONDS)
    back_at = found.pop("back_at", None)
    return {**found, "back_seconds": None if back_at is None else round(back_at - returned, 1)}


def main() -> None:
    """Run a role, or all."""
    parser = FlagParser("python -m loadtest.stages.carriers", __doc__)
    parser.add_argument("--role", choices=("head", "stage"), help="used by this program itself, as are the others")
    parser.add_argument("--carrier", choices=("grpc", "gloo"))
    parser.add_argument("--address")
    flags = parser.parse_args()
    if flags.role is None:
        with TemporaryDirectory() as folder:
            found = {carrier: compare(carrier, Path(folder)) for carrier in ("grpc", "gloo")}
        print(json.dumps({**found, "cut_seconds": CUT_SECONDS, "processor": processor()}))
    elif flags.carrier == "gloo":
        run_head(lambda: open_gloo(flags.address, ("head", "stage").index(flags.role)))
    elif flags.role == "stage":
        serve_grpc(flags.address)
    else:
        with asyncio.Runner() as runner:
            run_head(lambda: open_grpc(flags.address, runner))


if __name__ == "__main__":
    main()
