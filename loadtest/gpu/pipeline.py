"""Runs the whole pipeline on the demonstration models; part of `python -m loadtest.gpu`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import torch

SECONDS = 150
NUM_TOKENS = 48


def pipeline(device: torch.device) -> dict[str, Any]:
    """Run `bough demo`; returns whether trees and plain decoding gave the same tokens, and the speeds.

    In a dry run on the CPU, its workers are simulated.
    """
    command = [sys.executable, "-m", "bough.cli.main", "demo", "--max-tokens", str(NUM_TOKENS)]
    command += ["--simulate", "all-resident"] if device.type == "cpu" else []
    environ = {**os.environ, "BOUGH_TARGET_DEVICE": str(device), "BOUGH_DRAFT_DEVICE": str(device)}
    try:
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return {"is_same": False, "error": f"no answer within {SECONDS} seconds"}
    *_, last = ["", *done.stdout.splitlines()]
    if done.returncode not in (0, 1) or not last.startswith("{"):  # 1 is Python's own status too, of a missing package
        return {"is_same": False, "error": done.stderr[-500:]}
    return {"is_same": done.returncode == 0, **json.loads(last)}
