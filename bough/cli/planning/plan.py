"""`bough plan`: predicts a model's memory and speed from the headers of its weights and the machine's speeds."""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from bough.cli.flags.planning import PLAN_SETTINGS, PlanConfig
from bough.cli.planning.demonstration import STREAMED, is_demonstration, placement_flags
from bough.cli.planning.plan_model import Plan, make_plan
from bough.cli.planning.plan_stages import NETWORK, NETWORK_SECONDS, StagePlan, make_stage_plan
from bough.config.processes import parse
from bough.errors import ConfigError
from bough.sizing.cost_model import LAYER_SECONDS, MemoryPurchase, Rate, Speed, SweepModel
from bough.sizing.placement import Tier, gigabytes

TREE_SIZES = (1, 16, 64, 128, 256, 512, 1024)
MAP_WIDTH = 80
WIDTH, HEIGHT = 64, 10  # characters of the plot
MARK, KNEE_MARK = "*", "K"
LETTERS = {Tier.RESIDENT: "R", Tier.ELSEWHERE: "o", Tier.HOST: "h", Tier.DISK: "."}
UNITS = {"compute": (1e12, "TFLOP/s")}
OTHER_UNIT = (1e9, "GB/s")
SPEED_NAMES = {
    "disk": "from disk",
    "host_link": "host to gpu",
    "crossing": "gpu to gpu",
    "memory": "own memory",
    "compute": "products",
    "unpack": "unpacking",
}


async def plan(arguments: argparse.Namespace) -> int:
    """Print a plan as tables and a plot, or as one JSON line."""
    if arguments.stages:
        return _plan_stages(settings_from(arguments), arguments)
    result = make_plan(settings_from(arguments))
    if arguments.json:
        print(json.dumps(as_json(result)))
    else:
        print_report(result)
    return 0


def _plan_stages(settings: PlanConfig, arguments: argparse.Namespace) -> int:
    result = make_stage_plan(settings, arguments.stages)
    if arguments.json:
        print(json.dumps(stages_as_json(result)))
    else:
        for part in (_model, _members, _speeds, _rates, _alone):
            print("\n".join(part(result)), end="\n\n")
    return 0


def settings_from(arguments: argparse.Namespace) -> PlanConfig:
    """Settings from the flags, else from the target's environment variables.

    Raises:
        ConfigError: names the invalid flag.
    """
    placement = [] if arguments.stages else placement_flags(arguments.model, os.environ)
    flags = ["--model", arguments.model, *placement]
    for name in PLAN_SETTINGS:
        if (value := getattr(arguments, name)) is not None:
            flags += ["--" + name.replace("_", "-"), value]
    settings = parse(PlanConfig, "target_worker", flags, os.environ)
    for name in ("host_memory", "host_link_speed"):
        if settings.device == "cpu" and (value := getattr(settings, name)):
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag}: must not be given with --device cpu, whose memory is the host's, got {value}")
    return settings


def print_report(plan: Plan) -> None:
    """Print the whole report to standard output."""
    for part in (_model, _places, _speeds, _sweeps, _rates, _prices):
        print("\n".join(part(plan)), end="\n\n")
    print("seconds per sweep by tokens in it (K: the knee)\n")
    beyond_knee = max(TREE_SIZES[-1], min(2 * plan.sweep.knee, 16 * TREE_SIZES[-1]))
    print(text_plot(plan.sweep, beyond_knee))


def _model(plan: Plan | StagePlan) -> Iterator[str]:
    shapes = plan.shapes
    yield f"{plan.model}: {shapes.description}"
    yield (
        f"weights {gigabytes(sum(shapes.layer_bytes) + shapes.resident_bytes)}: {len(shapes.layer_bytes)} layers of "
        f"{_sizes(shapes.layer_bytes)}, embeddings and head {gigabytes(shapes.resident_bytes)}"
    )
    yield (
        f"a token: {shapes.work.flops_per_token / 1e9:.3g} GFLOP of products ({max(shapes.layer_flops) / 1e9:.3g} in a "
        f"layer), {shapes.kv.row_bytes / 1e6:.3g} MB of KV"
    )


def _sizes(layer_bytes: tuple[int, ...]) -> str:
    least, most = min(layer_bytes), max(layer_bytes)
    return gigabytes(most) if least == most else f"{gigabytes(least)} to {gigabytes(most)}"


def _places(plan: Plan) -> Iterator[str]:
    placement = plan.placement
    yield f"device  {gigabytes(placement.device_bytes)} of {gigabytes(plan.budgets.device)}: {placement.fixed}"
    if plan.budgets.host:
        yield f"host    {gigabytes(placement.host_bytes)} of {gigabytes(plan.budgets.host)}"
    yield f"layers  {placement}"
    letters = "".join(LETTERS[tier] for tier in placement.tiers)
    legend = ", ".join(f"{LETTERS[tier]} {tier.value}" for tier in Tier if placement.layers(tier))
    for begin in range(0, len(letters), MAP_WIDTH):
        yield f"  {begin:4}  {letters[begin : begin + MAP_WIDTH]}"
    yield f"        one letter a layer: {legend}"
    disk_bytes = placement.num_bytes(Tier.DISK)
    kv, layer_bytes = placement.fixed.host_kv, placement.num_bytes(Tier.HOST) + disk_bytes
    kv_part = f", and the KV of its sessions, {gigabytes(kv)} at most" if kv else ""
    if placement.expert_bytes:
        yield (
            f"experts {gigabytes(placement.expert_bytes)}; a sweep moves those that its rows choose, except the "
            f"the {gigabytes(placement.fixed.experts)} that stay"
        )
    yield f"every sweep moves {gigabytes(layer_bytes)} of layers, {gigabytes(disk_bytes)} of it from disk{kv_part}"
    if is_demonstration(plan.model) and len(placement.streamed) == len(placement.tiers):
        yield STREAMED


def _speeds(plan: Plan | StagePlan) -> Iterator[str]:
    for key, name in SPEED_NAMES.items():
        speed: Speed | None = getattr(plan.speeds, key)
        unit, unit_name = UNITS.get(key, OTHER_UNIT)
        if speed is None:
            is_needed = key == "memory" or (key == "unpack" and plan.shapes.packed is not None)
            yield f"{name:12} {'not known, left out' if is_needed else 'not needed'}"
        else:
            yield f"{name:12} {speed.per_second / unit:9.4g} {unit_name:8} {speed.origin}"


def _sweeps(plan: Plan) -> Iterator[str]:
    sweep = plan.sweep
    yield f"{'tokens':>8}{'link s':>10}{'compute s':>11}{'sweep s':>10}   limit"
    for tokens in sorted({*TREE_SIZES, sweep.knee} - {0}):
        link = sweep.link_seconds_of(tokens)
        limit = "link" if sweep.compute_seconds(tokens) <= link else "compute"
        knee = "  <- knee" if tokens == sweep.knee else ""
        yield (
            f"{tokens:8}{link:10.3f}{sweep.compute_seconds(tokens):11.3f}{sweep.seconds(tokens):10.3f}   {limit}{knee}"
        )
    if sweep.work.other_seconds:
        rest = f"{1000 * LAYER_SECONDS} ms a layer for the rest, as with 1,000 tokens of context"
        yield f"compute counts products, and {rest}: assumptions, never measured on a GPU"
    else:
        yield "compute counts products only; attention, norms and sampling add to it, and dominate in small layers"
    if sweep.expert_seconds:
        yield "experts are assumed to be chosen uniformly and independently; real rows share more of them"
    yield f"a sweep has up to {plan.max_sweep_tokens} tokens of prompts and trees (--max-sweep-tokens)"
    if sweep.knee == 0:
        yield "no knee: even the fewest rows take longer to compute than to move over the link"


def _rates(plan: Plan | StagePlan) -> Iterator[str]:
    yield f"{'tokens a round':>16}{'draft s':>10}{'sweep s':>10}{'tokens/s':>10}"
    for rate in plan.rates:
        yield (
            f"{rate.tokens_per_round:16g}{rate.draft_seconds:10.3f}{rate.sweep_seconds:10.3f}"
            f"{rate.tokens_per_second:10.3f}{'   plain decoding' if rate.tokens_per_round == 1 else ''}"
        )
    yield f"trees of {plan.num_nodes} nodes; {_drafting(plan)}"


def _drafting(plan: Plan | StagePlan) -> str:
    draft = plan.draft
    if draft is None:
        return "drafting is assumed to cost nothing (--draft names a draft model)"
    return (
        f"{draft.num_steps} draft steps of {draft.step_seconds:.4f} s, the longer of reading\n"
        f"{gigabytes(draft.weight_bytes)} from memory and computing {draft.width} rows, on a device as fast as the "
        "target's; nothing is grown ahead"
    )


def _members(plan: StagePlan) -> Iterator[str]:
    yield f"{'memory':>10}{'layers':>12}{'resident':>10}{'streamed':>10}{'KV':>10}{'link s':>10}   machine"
    for member in plan.members:
        layers = f"{member.layers.start} to {member.layers.stop - 1}"
        sizes = (member.load.resident_bytes, member.load.streamed_bytes, member.load.kv_bytes)
        yield (
            f"{gigabytes(member.memory_bytes):>10}{layers:>12}{''.join(f'{gigabytes(size):>10}' for size in sizes)}"
            f"{member.link_seconds:10.3f}   {member.name}"
        )
    if plan.shapes.apart is not None:
        yield "experts of a layer that streams all move with it"
    sweep, nodes = plan.sweep, plan.num_nodes
    yield (
        f"a sweep of {nodes} tokens: {sweep.seconds(nodes):.3f} s, the longer of the slowest link and of computing, "
        f"{sweep.compute_seconds(nodes):.3f} s,\nof which {sweep.crossing_seconds(nodes):.3f} s are "
        f"{sweep.num_crossings} hops over the network ({NETWORK.origin}, {NETWORK_SECONDS * 1000} ms)"
    )


def _alone(plan: StagePlan) -> Iterator[str]:
    head = plan.members[0]
    if isinstance(plan.alone, str):
        yield f"{head.name} alone is too small: {plan.alone}"
        return
    yield f"{head.name} alone: {plan.alone.placement}"
    yield from _rates(plan.alone)


def _prices(plan: Plan) -> Iterator[str]:
    before = plan.sweep.seconds(plan.num_nodes)
    yield f"more memory buys, of {before:.3f} s for a sweep of {plan.num_nodes} tokens:"
    yield from (f"  {_price(purchase)}" for purchase in plan.purchases)


def _price(purchase: MemoryPurchase) -> str:
    return (
        f"{purchase.added_bytes // 1000**3:+} GB of {purchase.kind} memory: {purchase.saved_seconds:.3f} s less "
        f"({purchase.sweep_seconds:.3f} s, {gigabytes(purchase.link_bytes)} over the link at most)"
    )


def as_json(plan: Plan) -> dict[str, Any]:
    """The content of `bough plan --json`: bytes, seconds, and operations or bytes per second."""
    shapes, placement, sweep = plan.shapes, plan.placement, plan.sweep
    return {
        "model": plan.model,
        "description": shapes.description,
        "weight_bytes": sum(shapes.layer_bytes) + shapes.resident_bytes,
        "resident_bytes": shapes.resident_bytes,
        "layer_bytes": shapes.layer_bytes,
        "layer_flops_per_token": shapes.layer_flops,
        "flops_per_token": shapes.work.flops_per_token,
        "kv_bytes_per_token": shapes.kv.row_bytes,
        "budgets": asdict(plan.budgets),
        "fixed_bytes": asdict(placement.fixed),
        "device_bytes": placement.device_bytes,
        "host_bytes": placement.host_bytes,
        "tiers": [tier.value for tier in placement.tiers],
        "num_slabs": placement.num_slabs,
        "sweep_bytes": {"link": placement.link_bytes, "disk": placement.num_bytes(Tier.DISK)},
        "speeds": asdict(plan.speeds),
        "link_seconds": sweep.link_seconds_of(plan.num_nodes),
        "knee_tokens": sweep.knee,
        "max_sweep_tokens": plan.max_sweep_tokens,
        "sweeps": _sweeps_as_json(sweep),
        "tree_nodes": plan.num_nodes,
        "draft": asdict(plan.draft) if plan.draft else None,
        "rates": _rates_as_json(plan.rates),
        "purchases": [asdict(purchase) for purchase in plan.purchases],
    }


def stages_as_json(plan: StagePlan) -> dict[str, Any]:
    """The content of `bough plan --stages ... --json`."""
    return {
        "model": plan.model,
        "description": plan.shapes.description,
        "stages": [
            {
                "name": member.name,
                "memory_bytes": member.memory_bytes,
                "first_layer": member.layers.start,
                "num_layers": len(member.layers),
                **member.load._asdict(),
                "link_seconds": member.link_seconds,
            }
            for member in plan.members
        ],
        "speeds": asdict(plan.speeds),
        "network": {**asdict(NETWORK), "hop_seconds": NETWORK_SECONDS},
        "tree_nodes": plan.num_nodes,
        "sweeps": _sweeps_as_json(plan.sweep),
        "draft": asdict(plan.draft) if plan.draft else None,
        "rates": _rates_as_json(plan.rates),
        "alone": None if isinstance(plan.alone, str) else as_json(plan.alone),
        "alone_refused": plan.alone if isinstance(plan.alone, str) else None,
    }


def _sweeps_as_json(sweep: SweepModel) -> list[dict[str, Any]]:
    return [
        {
            "tokens": n,
            "link_seconds": sweep.link_seconds_of(n),
            "compute_seconds": sweep.compute_seconds(n),
            "seconds": sweep.seconds(n),
        }
        for n in sorted({*TREE_SIZES, sweep.knee} - {0})
    ]


def _rates_as_json(rates: Sequence[Rate]) -> list[dict[str, Any]]:
    return [{**asdict(rate), "tokens_per_second": rate.tokens_per_second} for rate in rates]


def text_plot(model: SweepModel, most: int) -> str:
    """A text plot: tokens from 1 to `most` on a logarithmic axis, seconds from 0 on a linear axis."""
    columns = [round(math.exp(math.log(most) * i / (WIDTH - 1))) for i in range(WIDTH)]
    seconds = [model.seconds(tokens) for tokens in columns]
    highest = max(seconds)
    knee = max((i for i, tokens in enumerate(columns) if tokens <= model.knee), default=-1)
    lines = []
    for level in range(HEIGHT, -1, -1):
        marks = (_mark(s, highest, level, is_knee=i == knee) for i, s in enumerate(seconds))
        label = f"{highest * level / HEIGHT:9.3g}" if level % 5 == 0 else " " * 9
        lines.append(f"{label} |{''.join(marks)}".rstrip())
    return "\n".join([*lines, " " * 10 + "+" + "-" * WIDTH, " " * 11 + _axis(columns)])


def _mark(seconds: float, highest: float, level: int, *, is_knee: bool) -> str:
    is_here = round(seconds / highest * HEIGHT) == level
    return (KNEE_MARK if is_knee else MARK) if is_here else " "


def _axis(columns: Sequence[int]) -> str:
    """Labels of the token axis that do not overlap."""
    axis = ""
    for power in range(columns[-1].bit_length()):
        column = next(i for i, tokens in enumerate(columns) if tokens >= 2**power)
        if power % 2 == 0 and column >= len(axis):
            axis = axis.ljust(column) + f"{columns[column]} "
    return axis + "tokens"
