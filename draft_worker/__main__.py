"""`python -m draft_worker`: one draft worker, until SIGTERM."""

from __future__ import annotations

import os
import sys

from bough.config import DraftConfig, parse
from bough.pb import draft_pb2, draft_pb2_grpc
from bough.process import configure_logging, new_worker_id, run, serve_worker
from bough.rpc import service_name
from draft_worker.service import DraftService
from draft_worker.worker import DraftWorker


async def main() -> None:
    """Reads the settings and serves."""
    config = parse(DraftConfig, "draft_worker", sys.argv[1:], os.environ)
    configure_logging(config.log_level)
    worker_id = new_worker_id("draft")
    await serve_worker(
        config,
        "draft",
        worker_id,
        service_name(draft_pb2.DESCRIPTOR, "Draft"),
        DraftService(),
        draft_pb2_grpc.add_DraftServicer_to_server,
        lambda: DraftWorker(config, worker_id),
    )


if __name__ == "__main__":
    run(main)
