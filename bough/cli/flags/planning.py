"""Flags of `bough plan`, `bough shape` and `bough simulate`."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields

from bough.cli.flags.reaching import add_address
from bough.cli.flags.requests import MOST_NODES
from bough.config.flag_parser import checked
from bough.config.parsers import DRAFT_BITS, number, one_of, parse_amount, parse_stages
from bough.config.processes import TargetConfig
from bough.config.reader import setting
from bough.trees.tree_plan import Scheme

DEFAULT_MIX = "200:200"
MOST = 100_000  # users, or workers of a kind
PLAN_SETTINGS = (
    "draft", "draft_bits", "device", "device_memory", "host_memory", "kv_memory", "kv_sessions", "kv_tier",
    "ring_memory", "resident_devices", "resident_layers", "experts", "max_context", "max_nodes", "max_sweep_tokens",
    "rows", "dtype", "bits", "threads", "link_threads", "link_speed", "host_link_speed", "crossing_speed",
    "compute_speed", "memory_speed", "unpack_speed",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanConfig(TargetConfig):
    """Settings of `bough plan`: the planned target's and its machine's, which may be another machine."""

    draft: str = setting("", "model folder, GGUF file or hub id of the draft, to include its time in each round")
    draft_bits: str = setting("auto", "the draft worker's --bits", one_of(*DRAFT_BITS))
    bits: int = setting(
        0,
        "bits of the layers' matrices, instead of the model's: 4, 8 or 16",
        one_of(0, 4, 8, 16),
    )
    device: str = setting("", "cpu, or gpu with its own memory; by default this machine's", one_of("", "cpu", "gpu"))
    link_speed: float = setting(0.0, "GB/s from disk; measured by default", parse_amount)
    host_link_speed: float = setting(0.0, "GB/s from host memory to a gpu's; measured by default", parse_amount)
    crossing_speed: float = setting(0.0, "GB/s from one gpu to another; measured or assumed by default", parse_amount)
    compute_speed: float = setting(
        0.0, "TFLOP/s of products, on a gpu its 16-bit peak; measured by default", parse_amount
    )
    memory_speed: float = setting(0.0, "GB/s of the accelerator's memory; measured by default", parse_amount)
    unpack_speed: float = setting(
        0.0, "GB/s of weights that are unpacked before products; measured by default", parse_amount
    )


def add_plan(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `bough plan`."""
    model = "GGUF file, model folder or hub id; headers of the weights suffice, or config.json of an unquantized model"
    parser.add_argument("model", metavar="MODEL", help=model)
    texts = {setting.name: setting.metadata["help"] for setting in fields(PlanConfig)}
    for name in PLAN_SETTINGS:
        parser.add_argument("--" + name.replace("_", "-"), help=texts[name])
    stages = "instead of --device-memory: machines that share the layers, the head first; all have the same speeds"
    parser.add_argument("--stages", type=checked(parse_stages), metavar="HOST:MEMORY,...", help=stages)
    parser.add_argument("--json", action="store_true", help="print one JSON line instead of tables")


def add_shape(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `bough shape`."""
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--vector", metavar="FILE", help="JSON list of acceptances by rank, or of such lists by depth")
    source.add_argument("--from-live", action="store_true", help="the smoothed measurements of a running orchestrator")
    size = checked(number(int, 1, MOST_NODES))
    parser.add_argument("--nodes", type=size, required=True, help="maximum nodes, including the root")
    parser.add_argument("--levels", type=size, help="maximum levels, including the root's (default: unlimited)")
    parser.add_argument("--max-children", type=size, help="maximum children of a node (default: as many as measured)")
    schemes = [scheme.value for scheme in Scheme]
    scheme = f"with --from-live: the scheme whose trees were counted (default {Scheme.TARGET.value})"
    parser.add_argument("--scheme", choices=schemes, help=scheme)
    parser.add_argument("--by-depth", action="store_true", help="with --from-live: an acceptance for each depth")
    add_address(parser)


def add_simulate(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `bough simulate`."""
    add, count, amount = parser.add_argument, checked(number(int, 1, MOST)), checked(number(float, 0, 1e6))
    add("profile", help="name of a shipped profile, or a JSON file; `bough simulate list` names those that are shipped")
    users = f"users at once, 1 to {MOST} (default 1); several numbers are simulated one after another"
    add("--users", type=count, nargs="+", default=[1], metavar="N", help=users)
    add("--targets", type=count, default=1, help="target workers, 1 or more (default 1)")
    drafts = "draft workers; 0 is plain decoding (default 1)"
    add("--drafts", type=checked(number(int, 0, MOST)), default=1, help=drafts)
    mix = f"kinds of requests: tokens of prompt and answer, and how often each comes (default {DEFAULT_MIX})"
    add("--mix", default=DEFAULT_MIX, metavar="PROMPT:OUTPUT[:WEIGHT],...", help=mix)
    think = "mean time from an answer to the next question (default 0)"
    add("--think", type=amount, default=0.0, metavar="SECONDS", help=think)
    gather = "how long a sweep may wait for sessions that draft, in sweeps (default 1)"
    add("--gather", type=amount, default=1.0, metavar="SWEEPS", help=gather)
    nodes = "fixed tree size, divided among sessions; requires --depth"
    add("--nodes", type=checked(number(int, 2, MOST_NODES)), metavar="N", help=nodes)
    add("--depth", type=checked(number(int, 1, MOST_NODES)), metavar="N", help="with --nodes: depth below the root")
    add(
        "--network",
        type=checked(number(float, 0, 1e3)),
        metavar="SECONDS",
        help="one-way network time, instead of the profile's",
    )
    add("--seed", type=checked(number(int, 0)), default=1, help="seed of the random numbers (default 1)")
    add(
        "--no-purchases",
        action="store_true",
        help="skip the search for the best next purchase, which takes ten times as long",
    )
    add("--json", action="store_true", help="print one JSON line instead of a table")
