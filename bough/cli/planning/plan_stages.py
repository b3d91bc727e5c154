"""The model behind `bough plan --stages`: how a target spans machines, and what that saves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from bough.cli.flags.planning import PlanConfig
from bough.cli.planning.plan_model import (
    TOKENS_PER_ROUND,
    DraftCost,
    Plan,
    Sizes,
    draft_cost,
    find_sizes,
    find_speeds,
    plan_of,
    tree_size,
)
from bough.errors import ConfigError
from bough.model.architecture.architecture import max_positions
from bough.model.sizes.memory_budget import (
    FLOAT32_BYTES,
    hidden_bytes,
    host_budget,
    layer_kv_bytes,
    stage_buffer_bytes,
    with_kv_memory,
    with_sweep_tokens,
)
from bough.model.sizes.model_sizes import ModelShapes
from bough.sizing.cost_model import Rate, Speed, Speeds, SweepModel, rate
from bough.sizing.placement import MIN_SLABS, Fixed, Placement, Tier
from bough.sizing.stage_split import StageLoad, StageRoom, link_seconds, split_layers, stage_load

NETWORK = Speed(125e6, "assumed: 1 Gbit/s")
NETWORK_SECONDS = 0.5e-3  # latency of a hop from machine to machine; assumed
NOT_WITH_STAGES = ("device_memory", "ring_memory", "resident_devices", "resident_layers")


@dataclass(frozen=True, slots=True)
class StagedSweep(SweepModel):
    """Predicted seconds of a sweep that goes from machine to machine; the crossings are those of the network."""

    def crossing_seconds(self, num_tokens: int) -> float:
        """Seconds of a sweep in which its hidden states, without padding, are on the network."""
        return self.num_crossings * (NETWORK_SECONDS + num_tokens * self.hidden_bytes / NETWORK.per_second)


@dataclass(frozen=True, slots=True)
class Member:
    """A machine, and what it gets."""

    name: str
    memory_bytes: int  # as given
    layers: range
    load: StageLoad
    link_seconds: float  # of a sweep


@dataclass(frozen=True, slots=True)
class StagePlan:
    """The result of the command."""

    model: str
    shapes: ModelShapes
    members: tuple[Member, ...]  # the head first
    speeds: Speeds  # of each machine
    sweep: StagedSweep
    num_nodes: int  # tree size assumed for rates
    draft: DraftCost | None
    rates: tuple[Rate, ...]
    alone: Plan | str  # the plan of the first machine alone; or why it is too small


def make_stage_plan(settings: PlanConfig, stages: Sequence[tuple[str, int]]) -> StagePlan:
    """Compute sizes, then speeds, then the split and its rates; `stages` are names and memory, the head's first.

    All machines are assumed to be as fast as one another.

    Raises:
        ConfigError: names the invalid flag.
    """
    for name in NOT_WITH_STAGES:
        if (value := getattr(settings, name)) != getattr(PlanConfig(model=settings.model), name):
            raise ConfigError(f"--{name.replace('_', '-')}: must be left out with --stages, got {value}")
    first, total = stages[0][1], sum(memory for _, memory in stages)
    sizes = find_sizes(replace(settings, device_memory=first))
    shapes, num_nodes, is_gpu = sizes.shapes, tree_size(sizes.settings), sizes.is_gpu
    together = sizes.settings
    host = host_budget(together, is_gpu)
    together = with_sweep_tokens(together, shapes.config, shapes.kv, first)
    together = with_kv_memory(together, shapes.kv, max_positions(shapes.config), total, host)
    fixed = shapes.fixed(together, is_gpu)
    tier = Tier.HOST if is_gpu and sum(shapes.layer_bytes) <= host - fixed.kept_on_host else Tier.DISK
    speeds = find_speeds(together, shapes, _all_streamed(shapes, fixed, tier), sizes.found.path, is_gpu)
    try:
        alone: Plan | str = plan_of(sizes, speeds)
    except ConfigError as exc:
        alone = str(exc)
    sweep = StagedSweep(
        shapes.rows,
        shapes.work,
        speeds,
        link_seconds=0.0,
        num_crossings=len(stages),
        hidden_bytes=hidden_bytes(shapes.config, shapes.kv.dtype) if is_gpu else _float32_hidden_bytes(shapes),
    )
    members = _split(sizes._replace(settings=together), stages, fixed, _link_speed(speeds, tier), sweep)
    sweep = replace(sweep, link_seconds=max(member.link_seconds for member in members))
    draft = draft_cost(together, speeds, is_gpu) if together.draft else None
    draft_seconds = draft.seconds if draft else 0.0
    rates = tuple(rate(sweep, tokens, num_nodes, draft_seconds) for tokens in TOKENS_PER_ROUND)
    return StagePlan(settings.model, shapes, members, speeds, sweep, num_nodes, draft, rates, alone)


def _split(
    sizes: Sizes, stages: Sequence[tuple[str, int]], fixed: Fixed, link_speed: float, sweep: StagedSweep
) -> tuple[Member, ...]:
    """The layers of each machine; `fixed` is the head's memory with the KV of all layers."""
    settings, _, shapes, is_gpu = sizes
    kv_bytes = layer_kv_bytes(settings, shapes.config, shapes.kv)
    buffers = stage_buffer_bytes(settings, is_gpu, shapes.config, shapes.kv, shapes.scratch_bytes)
    taken = [fixed.total - sum(kv_bytes), *[buffers] * (len(stages) - 1)]
    num_nodes = tree_size(settings)
    hops = sweep.crossing_seconds(num_nodes)
    layer_seconds = (sweep.compute_seconds(num_nodes) - hops) / len(shapes.layer_bytes)
    rooms = [
        StageRoom(name, memory - bytes_taken, link_speed, layer_seconds)
        for (name, memory), bytes_taken in zip(stages, taken, strict=True)
    ]
    split = split_layers(shapes.layer_bytes, [kv_bytes] * len(rooms), rooms, hops / len(stages))
    members = []
    for (name, memory), room, layers in zip(stages, rooms, split, strict=True):
        load = stage_load(shapes.layer_bytes, kv_bytes, layers, room)
        assert load is not None, "a split gives no member more than it can stream"
        members.append(Member(name, memory, layers, load, link_seconds(load, room)))
    return tuple(members)


def _all_streamed(shapes: ModelShapes, fixed: Fixed, tier: Tier) -> Placement:
    """A placement of which all speeds are needed that a split may need."""
    return Placement((tier,) * len(shapes.layer_bytes), shapes.layer_bytes, fixed, MIN_SLABS)


def _link_speed(speeds: Speeds, tier: Tier) -> float:
    """Bytes per second of streamed layers, which come from the host's memory or from disk."""
    needed = (speeds.host_link, speeds.disk if tier is Tier.DISK else None)
    return min(speed.per_second for speed in needed if speed is not None)


def _float32_hidden_bytes(shapes: ModelShapes) -> int:
    """Bytes of a row's hidden state if layers are compiled for a CPU, which keep it in float32."""
    return int(shapes.config.hidden_size) * FLOAT32_BYTES
