"""Memory budgets of a target, and the placement of its layers that follows."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

import torch

from bough.config.processes import TargetConfig
from bough.model.sizes.memory_budget import budgets, device_budget, free_device_bytes, host_budget, require_way_through
from bough.sizing.other_devices import OtherDevice, place_with
from bough.sizing.placement import Fixed, Placement, SeparateExperts, gigabytes, place, place_with_expert_cache

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
    all experts. With `others`, devices that layers stay on, layers keep their experts.

    Raises:
        ConfigError: names the setting that leaves too little memory, or that has no meaning on this device.
    """
    free, is_gpu = free_device_bytes(device), device.type != "cpu"
    device_bytes = device_budget(config, device)
    allowed = budgets(config, layer_bytes, device_bytes, host_budget(config, is_gpu))
    if others:
        placement = place_with(layer_bytes, fixed, allowed, others)
    elif apart is not None and config.experts != "all":
        placement = place_with_expert_cache(layer_bytes, apart, fixed, allowed, is_gpu, config.experts == "chosen")
    else:
        placement = place(layer_bytes, fixed, allowed)
    require_way_through(placement, is_gpu, allowed.host)
    said = "as told" if config.device_memory else f"of the {gigabytes(free)} that are free; the rest is left to others"
    beside = f", {gigabytes(allowed.host)} of the host's" if allowed.host else ""
    words = f"memory: {gigabytes(allowed.device)} ({said}){beside}; {placement}; {placement.fixed}"
    logger.info("%s", words)
    return Places(placement, words)
