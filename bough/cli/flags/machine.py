"""Flags of `bough up`, `bough demo` and `bough pack`."""

from __future__ import annotations

import argparse

from bough.config.flag_parser import FlagParser, checked
from bough.config.parsers import DRAFT_BITS, DTYPE_NAMES, number, parse_layers
from bough.config.processes import DEFAULT_PORT, PLANNERS

MIN_TOKENS = 16  # of `bough demo`


def add_demo(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `bough demo`."""
    parser.add_argument("--prompt", default="Explain how a rainbow forms, step by step.", help="what to answer")
    length = f"length of the answer, {MIN_TOKENS} at least to measure rates (default 64)"
    parser.add_argument("--max-tokens", type=checked(number(int, MIN_TOKENS)), default=64, help=length)
    parser.add_argument("--budget", type=int, help="nodes of a tree (they size themselves by default)")
    parser.add_argument("--simulate", metavar="PROFILE", help="workers without weights, as for `bough up`")


def up_arguments(*flags: str) -> argparse.Namespace:
    """What `bough up` is given by these flags, on a free port; no HTTP, as its usual port may be taken meanwhile."""
    parser = FlagParser()
    add_up(parser)
    return parser.parse_args(["--port", "0", "--http-port", "-1", *flags])


def add_up(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `bough up`."""
    parser.add_argument("--target", help="model folder, GGUF file or hub id; the demonstration model by default")
    parser.add_argument("--draft", help="the same for the draft, or none; the demonstration model has one by default")
    simulate = "workers without weights: a shipped profile's name or a JSON file (docs/simulated-workers.md)"
    parser.add_argument("--simulate", metavar="PROFILE", help=simulate)
    parser.add_argument("--drop-layers", help="layers that a substitute leaves out, such as 12-15")
    parser.add_argument("--dtype", choices=DTYPE_NAMES, help="type of the target (default: its own, bfloat16 on a CPU)")
    parser.add_argument("--max-context", help="most tokens of a session, prompt and output (default 2048)")
    parser.add_argument("--device-memory", help="memory for the target, KV and all (default: most of what is free)")
    parser.add_argument("--kv-memory", help="of that, for KV of all sessions (default: an eighth, at most 2GB)")
    parser.add_argument("--host-memory", help="beside a GPU: pinned memory for layers (default: most of what is free)")
    parser.add_argument(
        "--ahead-steps", help="most draft steps during a sweep (default 64 on a GPU of the draft's own)"
    )
    parser.add_argument("--draft-bits", choices=DRAFT_BITS, help="bits of the draft's products (default auto)")
    parser.add_argument("--draft-device", help="where the draft computes: cpu, cuda or cuda:1 (default: a GPU, if any)")
    parser.add_argument("--draft-dtype", choices=DTYPE_NAMES, help="data type of the draft (default: likewise)")
    parser.add_argument("--planner", choices=PLANNERS, help="who sizes trees (default self; fixed is to compare with)")
    parser.add_argument("--port", type=int, default=DEFAULT_PORT, help=f"of the orchestrator (default {DEFAULT_PORT})")
    http = "of the orchestrator, for OpenAI's clients (default 8000, or a free one; -1 is none)"
    parser.add_argument("--http-port", help=http)
    index = "a running Redis or Valkey; one is started by default. BOUGH_ORCHESTRATOR_INDEX_URL keeps passwords unseen"
    parser.add_argument("--index-url", default="", help=index)


def add_pack(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `bough pack`."""
    parser.add_argument("model", help="model folder or cached hub id, in 16 or 32 bits")
    parser.add_argument("--draft", action="store_true", help="write a draft: it shares embeddings and head with MODEL")
    layers = "of a draft: layers to leave out, such as 3,14"
    parser.add_argument("--drop-layers", type=checked(parse_layers), help=layers)
    bits = "for a weight: 4 (default) or 8; of a draft the average, scales included (default 6.5)"
    parser.add_argument("--bits", type=float, help=bits)
    parser.add_argument("--whole", action="store_true", help="of a draft: copy what it would share, to use elsewhere")
    parser.add_argument("--out", help="folder to write, continue or repair; MODEL-4bit or MODEL-draft here by default")
