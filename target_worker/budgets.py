"""What memory a target may take, from its settings and from what is free, and where its layers then live."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

import torch

from bough.config import TargetConfig
from bough.errors import ConfigError
from bough.model.memory import SHARE, budgets, free_device_bytes, free_host_bytes
from bough.placement import MIN_SLABS, Apart, Fixed, Placement, Tier, gigabytes, place, place_apart

logger = logging.getLogger(__name__)


class Places(NamedTuple):
    """Where layers live; and, in words, how much memory there is for it, why so much, and what takes it."""

    placement: Placement
    words: str


def choose_places(
    layer_bytes: Sequence[int], fixed: Fixed, config: TargetConfig, device: torch.device, apart: Apart | None = None
) -> Places:
    """A place for each layer, with its experts, or without where they find room of their own (`Fixed.experts`).

    They do where not everything stays in memory; of an accelerator's own, if the host's has room for all of them.

    Raises:
        ConfigError: naming the setting that leaves too little room, or that has no meaning on this device.
    """
    free = free_device_bytes(device)
    allowed = budgets(config, layer_bytes, config.device_memory or int(free * SHARE), _host_budget(config, device))
    if apart is not None and config.experts != "all":
        placement = place_apart(layer_bytes, apart, fixed, allowed, device.type != "cpu", config.experts == "chosen")
    else:
        placement = place(layer_bytes, fixed, allowed)
    if device.type != "cpu" and placement.layers(Tier.DISK) and not placement.num_host_slabs:
        least = placement.fixed.host_kv + placement.fixed.host_experts + MIN_SLABS * placement.slab_bytes
        raise ConfigError(
            f"--host-memory: {gigabytes(allowed.host)}; layers pass from disk to the GPU through pinned memory, which "
            f"must hold {MIN_SLABS}: {gigabytes(least)} or more would do"
        )
    said = "as told" if config.device_memory else f"{SHARE:.0%} of the {gigabytes(free)} that are free"
    beside = f", {gigabytes(allowed.host)} of the host's" if allowed.host else ""
    words = f"memory: {gigabytes(allowed.device)} ({said}){beside}; {placement}; {placement.fixed}"
    logger.info("%s", words)
    return Places(placement, words)


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
