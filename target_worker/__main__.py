"""`python -m target_worker`: one target worker, until SIGTERM."""

from __future__ import annotations

import os
import sys

from bough.config import TargetConfig, parse
from bough.pb import target_pb2, target_pb2_grpc
from bough.process import configure_logging, new_worker_id, run, serve_worker
from bough.rpc import service_name
from target_worker.service import TargetService
from target_worker.worker import TargetWorker


async def main() -> None:
    """Reads the settings and serves."""
    config = parse(TargetConfig, "target_worker", sys.argv[1:], os.environ)
    configure_logging(config.log_level)
    worker_id = new_worker_id("target")
    await serve_worker(
        config,
        "target",
        worker_id,
        service_name(target_pb2.DESCRIPTOR, "Target"),
        TargetService(),
        target_pb2_grpc.add_TargetServicer_to_server,
        lambda: TargetWorker(config, worker_id),
    )


if __name__ == "__main__":
    run(main)
