"""The model behind `bough plan`: sizes, placement, speeds, and predicted rates."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from bough.cli.flags.planning import PlanConfig
from bough.config.processes import OrchestratorConfig
from bough.errors import ConfigError
from bough.model.architecture.architecture import max_positions
from bough.model.backend import backend_of
from bough.model.loading.default_settings import CPU_ROWS, settled
from bough.model.loading.loading import DTYPES
from bough.model.running.batch_invariance import product_of
from bough.model.sizes.hardware_probe import (
    crossing_speed,
    disk_speed,
    find_device,
    has_gpu,
    host_link_speed,
    matrix_speed,
    memory_speed,
    num_gpus,
    unpack_speed,
)
from bough.model.sizes.memory_budget import (
    budgets,
    device_budget,
    hidden_bytes,
    host_budget,
    other_devices,
    require_way_through,
    with_kv_memory,
    with_sweep_tokens,
)
from bough.model.sizes.model_sizes import FoundModel, ModelShapes, find_model, model_shapes
from bough.model.sizes.target_limits import TargetLimits
from bough.model.threads import compute_with
from bough.sizing.cost_model import (
    MEMORY_SHARE,
    PEAK_SHARE,
    MemoryPurchase,
    Rate,
    Speed,
    Speeds,
    SweepModel,
    purchases,
    rate,
    step_seconds,
    sweep_model,
)
from bough.sizing.placement import TIMES_AS_SLOW, Budgets, Placement, Tier, place_with

TOKENS_PER_ROUND = (1.0, 3.0, 5.0, 8.0, 12.0)  # bonus token included, for which speeds are predicted
MOST_GPUS = 64  # default of a machine other than this one
COMPARED_ROWS = 256  # also measured, in addition to the rows of a chunk
GIGA, TERA = 1e9, 1e12


@dataclass(frozen=True, slots=True)
class DraftCost:
    """The cost of drafting in each round."""

    model: str
    weight_bytes: int  # read in every step
    num_steps: int
    width: int  # rows of a step
    step_seconds: float

    @property
    def seconds(self) -> float:
        """Seconds of a round."""
        return self.num_steps * self.step_seconds


@dataclass(frozen=True, slots=True)
class Plan:
    """The result of the command."""

    model: str
    shapes: ModelShapes
    budgets: Budgets
    placement: Placement
    speeds: Speeds
    sweep: SweepModel
    max_sweep_tokens: int  # of a worker with these settings
    num_nodes: int  # tree size assumed for rates and purchases
    draft: DraftCost | None
    rates: tuple[Rate, ...]
    purchases: tuple[MemoryPurchase, ...]


class Sizes(NamedTuple):
    """A model's sizes, and the settings by which they are placed."""

    settings: PlanConfig
    found: FoundModel
    shapes: ModelShapes
    is_gpu: bool


def make_plan(settings: PlanConfig) -> Plan:
    """Compute sizes, then the placement, then the speeds it needs, then rates. Raises ConfigError."""
    return plan_of(find_sizes(settings))


def find_sizes(settings: PlanConfig) -> Sizes:
    """The sizes of the configured model on the configured kind of device. Raises ConfigError."""
    found = find_model(settings.model)
    is_gpu = settings.device == "gpu" or (
        settings.device == "" and (settings.host_memory > 0 or settings.host_link_speed > 0 or has_gpu())
    )
    device_type = "cuda" if is_gpu else "cpu"
    settings = settled(settings, found.config, device_type)
    shapes = model_shapes(found, settings.dtype, settings.bits, settings.rows, device_type)
    _require_budgets(settings, is_gpu)
    return Sizes(settings, found, shapes, is_gpu)


def plan_of(sizes: Sizes, speeds: Speeds | None = None) -> Plan:
    """The plan of one machine; without `speeds`, those that it needs are looked up or measured. Raises ConfigError."""
    settings, found, shapes, is_gpu = sizes
    config = found.config
    device, host = device_budget(settings, find_device(is_gpu)), host_budget(settings, is_gpu)
    settings = with_sweep_tokens(settings, config, shapes.kv, device)
    settings = with_kv_memory(settings, shapes.kv, max_positions(config), device, host)
    fixed = shapes.fixed(settings, is_gpu)
    allowed = budgets(settings, shapes.layer_bytes, device, host)
    apart = shapes.apart if settings.experts != "all" else None
    here = num_gpus() or MOST_GPUS
    others = other_devices(settings, config, shapes.kv, shapes.scratch_bytes, "cuda:0", here if is_gpu else 0)

    def place_in(budgets: Budgets) -> Placement:
        is_forced = settings.experts == "chosen"
        return place_with(shapes.layer_bytes, fixed, budgets, others, apart, is_gpu, is_forced)

    placement = place_in(allowed)
    require_way_through(placement, is_gpu, allowed.host)
    speeds = speeds or find_speeds(settings, shapes, placement, found.path, is_gpu)
    draft = draft_cost(settings, speeds, is_gpu) if settings.draft else None

    def sweep_of(placement: Placement) -> SweepModel:
        return sweep_model(placement, shapes.work, shapes.rows, speeds, hidden_bytes(config, shapes.kv.dtype))

    sweep, num_nodes = sweep_of(placement), tree_size(settings)
    limits = TargetLimits.of(settings, max_positions(config), bool(sizes.settings.max_sweep_tokens))
    draft_seconds = draft.seconds if draft else 0.0
    kinds = ("device", "host") if is_gpu else ("device",)
    prices = purchases(allowed, kinds, place_in, lambda placed: sweep_of(placed).seconds(num_nodes))
    return Plan(
        settings.model,
        shapes,
        allowed,
        placement,
        speeds,
        sweep,
        limits.sweep_tokens(sweep.knee),
        num_nodes,
        draft,
        tuple(rate(sweep, tokens, num_nodes, draft_seconds) for tokens in TOKENS_PER_ROUND),
        tuple(prices),
    )


def tree_size(settings: PlanConfig) -> int:
    """Nodes of the trees for which rates are predicted."""
    return min(OrchestratorConfig().budget, settings.max_nodes)


def _require_budgets(settings: PlanConfig, is_gpu: bool) -> None:
    """Raise ConfigError for a GPU of another machine if its memory is not given."""
    for flag, given, size in (("device", settings.device_memory, 24), ("host", settings.host_memory, 128)):
        if is_gpu and not has_gpu() and not given:
            raise ConfigError(f"--{flag}-memory: missing; must be a size such as {size}GB, as this machine has no gpu")


def find_speeds(settings: PlanConfig, shapes: ModelShapes, placement: Placement, folder: Path, is_gpu: bool) -> Speeds:
    """The speeds that the plan needs, from flags or measured on this machine.

    Raises:
        ConfigError: names the flag of a speed that is not given and cannot be measured here.
    """
    dtype, device = DTYPES[settings.dtype], find_device(is_gpu)
    is_here = not is_gpu or has_gpu()
    compute_with(settings.threads)
    rows = (settings.rows, COMPARED_ROWS if settings.rows != COMPARED_ROWS else CPU_ROWS)
    compute = _from_flag("--compute-speed", settings.compute_speed, TERA)
    compute = compute.reached(PEAK_SHARE) if is_gpu and compute else compute
    host_link = _from_flag("--host-link-speed", settings.host_link_speed, GIGA) if is_gpu else None
    memory = _from_flag("--memory-speed", settings.memory_speed, GIGA)
    unpack = _from_flag("--unpack-speed", settings.unpack_speed, GIGA) if shapes.packed else None
    disk = _from_flag("--link-speed", settings.link_speed, GIGA)
    if is_here:
        product = product_of(shapes.rows, backend_of(device))
        compute = compute or matrix_speed(shapes.matrices, rows, dtype, device, product)
        host_link = host_link or (host_link_speed(device) if is_gpu else None)
        memory = memory or memory_speed(device)
        if unpack is None and shapes.packed is not None:
            unpack = unpack_speed(shapes.packed, dtype, device)
    if disk is None and (placement.num_bytes(Tier.DISK) or (placement.expert_bytes and not is_gpu)):
        disk = disk_speed(folder, settings.link_threads)
    if compute is None:
        raise ConfigError("--compute-speed: missing; must be TFLOP/s, as there is no gpu here to measure")
    if is_gpu and host_link is None and placement.link_bytes:
        raise ConfigError("--host-link-speed: missing; must be GB/s, as there is no gpu here to measure")
    if settings.draft and memory is None:
        raise ConfigError("--memory-speed: missing; must be GB/s, as the draft's time depends on it")
    crossing = _crossing_speed(settings, host_link) if placement.num_crossings else None
    memory = memory.reached(MEMORY_SHARE) if is_gpu and memory else memory
    return Speeds(compute, disk, host_link, memory, unpack, crossing)


def _crossing_speed(settings: PlanConfig, host_link: Speed | None) -> Speed | None:
    """Speed between two GPUs: given, or measured if there are two, or that of copies through the host's memory."""
    if speed := _from_flag("--crossing-speed", settings.crossing_speed, GIGA):
        return speed
    if num_gpus() > 1:
        return crossing_speed("cuda:0", settings.resident_devices[0][0])
    if host_link is None:
        return None
    return Speed(
        host_link.per_second / TIMES_AS_SLOW,
        "assumed: copies through the host's memory, as this machine has no second gpu",
    )


def _from_flag(flag: str, value: float, unit: float) -> Speed | None:
    return Speed(value * unit, f"set by {flag}") if value else None


def draft_cost(settings: PlanConfig, speeds: Speeds, is_gpu: bool) -> DraftCost:
    """The cost of growing a tree of the orchestrator's default width and depth on a device like the target's.

    Raises:
        ConfigError: the draft cannot stay packed.
    """
    defaults = OrchestratorConfig()
    found = find_model(settings.draft)
    shapes = model_shapes(found, settings.dtype, 0, defaults.width)
    if settings.draft_bits == "4":
        if not is_gpu or shapes.packed is None:
            why = f"{settings.draft} is not packed" if is_gpu else "on the CPU nothing stays packed"
            raise ConfigError(f"--draft-bits: must be auto or 16, got 4: {why}")
        shapes = model_shapes(found, settings.dtype, 0, defaults.width, "cuda")
    seconds = step_seconds(shapes.work, defaults.width, defaults.width, speeds)
    weight_bytes = round(shapes.work.bytes_read(defaults.width))
    return DraftCost(settings.draft, weight_bytes, defaults.depth, defaults.width, seconds)
