"""What memory a target may take, from its settings and from what is free, and where its layers then live."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

import torch

from bough.config import TargetConfig
from bough.errors import ConfigError
from bough.model.memory import SHARE, budgets, free_device_bytes, free_host_bytes
from bough.placement import (
    MIN_SLABS,
    Budgets,
    ExpertSizes,
    Fixed,
    Placement,
    Tier,
    gigabytes,
    place,
    place_apart,
)

logger = logging.getLogger(__name__)


class Parts(NamedTuple):
    """Of a mixture of experts whose layers can be read without them."""

    layer_bytes: Sequence[int]  # without
    experts: ExpertSizes


def choose_places(
    layer_bytes: Sequence[int], fixed: Fixed, config: TargetConfig, device: torch.device, parts: Parts | None = None
) -> Placement:
    """A place for each layer, with its experts, or without where they find room of their own (`Fixed.experts`).

    They do where not everything stays in memory, on the CPU.

    Raises:
        ConfigError: naming the setting that leaves too little room, or that has no meaning on this device.
    """
    free = free_device_bytes(device)
    allowed = budgets(config, layer_bytes, config.device_memory or int(free * SHARE), _host_budget(config, device))
    placement = _place(layer_bytes, fixed, allowed, None if _are_whole(config, device) else parts)
    if device.type != "cpu" and placement.layers(Tier.DISK) and not placement.num_host_slabs:
        raise ConfigError(
            f"--host-memory: {gigabytes(allowed.host)}; layers pass from disk to the GPU through pinned memory, which "
            f"must hold {MIN_SLABS}: {gigabytes(fixed.host_kv + MIN_SLABS * placement.slab_bytes)} or more would do"
        )
    said = "as told" if config.device_memory else f"{SHARE:.0%} of the {gigabytes(free)} that are free"
    beside = f", {gigabytes(allowed.host)} of the host's" if allowed.host else ""
    logger.info("memory budget %s (%s)%s: %s; %s", gigabytes(allowed.device), said, beside, placement, fixed)
    return placement


def _are_whole(config: TargetConfig, device: torch.device) -> bool:
    """Whether layers are read with all their experts."""
    if config.experts == "chosen" and device.type != "cpu":
        raise ConfigError("--experts: chosen; beside a GPU layers come with all their experts: auto or all would do")
    return config.experts == "all" or device.type != "cpu"


def _place(layer_bytes: Sequence[int], fixed: Fixed, allowed: Budgets, parts: Parts | None) -> Placement:
    if parts is None:
        return place(layer_bytes, fixed, allowed)
    if sum(layer_bytes) <= allowed.device - fixed.total and allowed.max_resident >= len(layer_bytes):
        return place(layer_bytes, fixed, allowed)  # nothing is read but once
    return place_apart(parts.layer_bytes, parts.experts, fixed, allowed)


def _host_budget(config: TargetConfig, device: torch.device) -> int:
    """Bytes of the host's memory for layers; 0 where the host is the accelerator."""
    if device.type != "cpu":
        return config.host_memory or int(free_host_bytes() * SHARE)
    if config.host_memory:
        raise ConfigError(
            f"--host-memory: {gigabytes(config.host_memory)}; on the CPU host and device have one memory, "
            "which --device-memory limits"
        )
    return 0
