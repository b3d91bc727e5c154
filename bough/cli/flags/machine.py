"""Flags of `bough up` and `bough demo`."""

from __future__ import annotations

import argparse

from bough.config.flag_parser import FlagParser, checked
from bough.config.parsers import DRAFT_BITS, DTYPE_NAMES, number
from bough.config.processes import DEFAULT_PORT, PLANNERS

MIN_TOKENS = 16  # of `bough demo`


def add_demo(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `bough demo`."""
    parser.add_argument("--prompt", default="Explain how a rainbow forms, step by step.", help="the prompt")
    length = f"length of the answer, at least {MIN_TOKENS} to measure rates (default 64)"
    parser.add_argument("--max-tokens", type=checked(number(int, MIN_TOKENS)), default=64, help=length)
    parser.add_argument("--budget", type=int, help="nodes of a tree (default: trees size themselves)")
    parser.add_argument("--simulate", metavar="PROFILE", help="workers without weights, as for `bough up`")


def up_arguments(*flags: str) -> argparse.Namespace:
    """Arguments of `bough up` with these flags, on a free port, without HTTP, as its usual port may be in use."""
    parser = FlagParser()
    add_up(parser)
    return parser.parse_args(["--port", "0", "--http-port", "-1", *flags])


def add_up(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `bough up`."""
    config = 'TOML file with these flags: kv-memory = "4GB"; flags of the command line win'
    parser.add_argument("--config", metavar="FILE", help=config)
    own = "default: the model's own on a GPU, bfloat16 on a CPU"
    parser.add_argument("--target", help="model folder, GGUF file or hub id; the demonstration model by default")
    draft = "model folder, GGUF file or hub id of the draft, or none; the demonstration model has one by default"
    parser.add_argument("--draft", help=draft)
    simulate = "workers without weights: a shipped profile's name or a JSON file (docs/simulated-workers.md)"
    parser.add_argument("--simulate", metavar="PROFILE", help=simulate)
    drops = "layers to leave out of the target, or of --draft, to make the draft, such as 12-15"
    parser.add_argument("--drop-layers", help=drops)
    parser.add_argument("--dtype", choices=DTYPE_NAMES, help=f"data type that the target computes in ({own})")
    context = "maximum tokens of a session, prompt and output (default: the model's own limit, if it fits --kv-memory)"
    parser.add_argument("--max-context", help=context)
    memory = "memory for the target's weights, KV and activations, such as 20GB (default: most of the free memory)"
    parser.add_argument("--device-memory", help=memory)
    parser.add_argument("--stages", help="processes that hold the target's layers together (default: 1)")
    parser.add_argument("--kv-memory", help="part of it for the KV of all sessions (default: an eighth, at most 2GB)")
    parser.add_argument(
        "--host-memory", help="with a GPU: pinned host memory for layers (default: most of the free memory)"
    )
    ahead = "maximum draft steps during a sweep (default: 64 if the draft has its own GPU, else 0)"
    parser.add_argument("--ahead-steps", help=ahead)
    parser.add_argument("--draft-bits", choices=DRAFT_BITS, help="bits of the draft's products (default auto)")
    parser.add_argument("--draft-device", help="where the draft computes: cpu, cuda or cuda:1 (default: a GPU, if any)")
    parser.add_argument("--draft-dtype", choices=DTYPE_NAMES, help=f"data type that the draft computes in ({own})")
    planner = "how trees are sized: self, by measured cost, or fixed, for comparison (default self)"
    parser.add_argument("--planner", choices=PLANNERS, help=planner)
    port = f"port of the orchestrator's gRPC API (default {DEFAULT_PORT}; 0 picks a free one)"
    parser.add_argument("--port", type=int, help=port)
    http = "port of the orchestrator's HTTP API, for OpenAI's clients (default 8000, or a free one; -1 is none)"
    parser.add_argument("--http-port", help=http)
    index = "URL of a running Redis or Valkey (default: one is started); BOUGH_ORCHESTRATOR_INDEX_URL hides a password"
    parser.add_argument("--index-url", default="", help=index)
