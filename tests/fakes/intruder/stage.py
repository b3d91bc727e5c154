"""The system under attack: simulated workers, an orchestrator with keys, and a secret shared by processes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from bough.rpc.server import open_channel
from bough.security.keys import hash_of, new_key
from bough.security.private_files import write_private
from loadtest.served.stack import Stack, stack, write_profile
from tests.fakes.intruder.callers import SERVICES, bearer, grpc_outcome
from tests.fakes.intruder.strangers import Secrets

SWEEP_SECONDS = 0.01
CHANGE_SECONDS = 20.0  # limit until a removed key is refused
EXPIRED = "2020-01-01T00:00:00Z"


@dataclass(frozen=True, slots=True)
class Stage:
    """The running processes and their secrets."""

    stack: Stack
    secrets: Secrets
    keys: Path
    addresses: dict[str, str]  # of gRPC, by kind of process
    url: str
    figures: str  # URL of the target's metrics


def new_secrets() -> Secrets:
    """New random secrets."""
    return Secrets(*(new_key() for _ in range(5)))


def write_keys(file: Path, secrets: Secrets, *, with_removed: bool) -> None:
    """Write the file of keys, with or without the removed tenant's."""
    lines = [
        {"name": "alice", "sha256": hash_of(secrets.alice)},
        {"name": "bob", "sha256": hash_of(secrets.bob)},
        {"name": "carol", "sha256": hash_of(secrets.expired), "expires": EXPIRED},
    ]
    if with_removed:
        lines.append({"name": "dave", "sha256": hash_of(secrets.removed)})
    write_private("--keys", str(file), "".join(f"{json.dumps(line)}\n" for line in lines))


@asynccontextmanager
async def staged(
    folder: Path, flags: Sequence[str] = (), orchestrator_flags: Sequence[str] = ()
) -> AsyncIterator[Stage]:
    """Start everything with `flags` for all services; Dave's key is used once and then removed."""
    secrets, keys, worker_key = new_secrets(), folder / "keys.jsonl", folder / "worker.key"
    write_keys(keys, secrets, with_removed=True)
    write_private("--worker-key-file", str(worker_key), secrets.worker)
    everywhere = ["--worker-key-file", str(worker_key), *flags]
    of_orchestrator = ["--keys", str(keys), *orchestrator_flags]
    async with stack(write_profile(folder, SWEEP_SECONDS), of_orchestrator, everywhere_flags=everywhere) as running:
        addresses = {kind: running.addresses(kind)[0] for kind in SERVICES}
        url = await running.http_url(secrets.worker)
        figures = f"http://{running.replicas['target'][0][1].metrics}/metrics"
        stage = Stage(running, secrets, keys, addresses, url, figures)
        await _remove_dave(stage)
        yield stage


async def _remove_dave(stage: Stage) -> None:
    """Remove Dave's key. Raises RuntimeError if it was not valid before, or still is afterwards."""
    async with open_channel(stage.addresses["orchestrator"]) as channel:
        call = next(call for call in SERVICES["orchestrator"] if call.method.endswith("GetLoads"))
        if (before := await grpc_outcome(channel, call, bearer(stage.secrets.removed))) != "OK":
            raise RuntimeError(f"a key that is about to be removed: {before}")
        write_keys(stage.keys, stage.secrets, with_removed=False)
        for name, process_id in stage.stack.process_ids().items():
            if name.startswith("orchestrator"):
                os.kill(process_id, signal.SIGHUP)
        async with asyncio.timeout(CHANGE_SECONDS):
            while await grpc_outcome(channel, call, bearer(stage.secrets.removed)) == "OK":
                await asyncio.sleep(0.1)
