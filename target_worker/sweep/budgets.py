"""Memory budgets of a target, and the placement of its layers that follows."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

import torch

from bough.config.processes import TargetConfig
from bough.errors import ConfigError
from bough.model.sizes.memory_budget import budgets, device_budget, free_device_bytes, host_budget, require_way_through
from bough.sizing.other_devices import OtherDevice, place_with
from bough.sizing.placement import Fixed, Placement, SeparateExperts, gigabytes

logger = logging.getLogger(__name__)


class Places(NamedTuple):
    """A placement, and a description of the memory budget and its uses."""

    placement: Placement
    words: str


def choose_places(
    layer_bytes: Sequence[int],
    fixed: Fixed,
    config: TargetConfig,
    device: torch.device,
    apart: SeparateExperts | None = None,
    others: Sequence[OtherDevice] = (),
) -> Places:
    """Place each layer, with its experts or, if given a cache of their own (`Fixed.experts`), without.

    Experts get a cache where not everything stays in memory; on a device with its own memory, only if host memory holds
    all experts. Layers that stay on `others` keep their experts. Raises ConfigError naming the setting that leaves too
    little memory, or that has no meaning on this device.
    """
    _require_free(others)
    free, is_gpu = free_device_bytes(device), device.type != "cpu"
    device_bytes = device_budget(config, device)
    allowed = budgets(config, layer_bytes, device_bytes, host_budget(config, is_gpu))
    parts = apart if config.experts != "all" else None
    placement = place_with(layer_bytes, fixed, allowed, others, parts, is_gpu, config.experts == "chosen")
    require_way_through(placement, is_gpu, allowed.host)
    said = "as told" if config.device_memory else f"of the {gigabytes(free)} that are free; the rest is left to others"
    beside = f", {gigabytes(allowed.host)} of the host's" if allowed.host else ""
    words = f"memory: {gigabytes(allowed.device)} ({said}){beside}; {placement}; {placement.fixed}"
    logger.info("%s", words)
    return Places(placement, words)


def _require_free(others: Sequence[OtherDevice]) -> None:
    """Raises ConfigError where another accelerator has less memory than is asked of it."""
    for other in others:
        free = free_device_bytes(torch.device(other.name))
        if other.budget > free:
            raise ConfigError(
                f"--resident-devices: {other.name} must be at most {gigabytes(free)}, which are free there, got "
                f"{gigabytes(other.budget)}"
            )
