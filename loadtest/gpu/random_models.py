"""Random models of any size for measurements: a few distinct layers on disk, which are repeated."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from accelerate import init_empty_weights
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, PretrainedConfig, initialization

from bough.model.checkpoint.checkpoint import Checkpoint
from bough.model.checkpoint.safetensors_folder import INDEX_NAME
from bough.model.loading.default_settings import CPU_ROWS, GPU_ROWS
from bough.model.loading.loading import Skeleton, build_skeleton
from bough.model.running.host_embeddings import host_bytes
from bough.model.sizes.memory_budget import activation_bytes, resident_bytes
from bough.model.sizes.target_limits import TargetLimits
from bough.sizing.placement import Budgets, Fixed, Placement, Tier, place
from target_worker.kv.kv_offload import OffloadedKV
from target_worker.link.layer_extents import LayerExtents, plan_layer
from target_worker.link.streams import DeviceStreams
from target_worker.sweep.streamed_model import StreamedModel
from target_worker.sweep.tiers import Tiers

LINK_THREADS = 8
GROUP = 128  # inputs that share a scale and a zero, as in published checkpoints
LAYER_NAME = re.compile(r"(.*\.layers\.)(\d+)(\..*)")


@dataclass(frozen=True, slots=True)
class Machine:
    """The device and memory that a measurement may use."""

    device: torch.device
    streams: DeviceStreams
    device_memory: int  # bytes, as a placement counts them
    host_memory: int  # bytes
    max_resident: int  # most resident layers

    @property
    def rows(self) -> int:
        """Number of rows of every matrix product."""
        return CPU_ROWS if self.device.type == "cpu" else GPU_ROWS


def write_random(folder: Path, config: PretrainedConfig, device: torch.device, is_packed: bool = False) -> Checkpoint:
    """Write a model of random bfloat16 weights, one file for each layer and one for the rest.

    With `is_packed` its layers' matrices are random numbers in AWQ's format, as quantizing a layer of a 70B takes long.
    """
    # There are no weights to initialise, and initialising would import torch's compiler.
    with init_empty_weights(), initialization.no_init_weights():
        model = AutoModelForCausalLM.from_config(config)
    files: dict[str, dict[str, torch.Tensor]] = {}
    for name, meta in model.state_dict().items():
        layer = LAYER_NAME.match(name)
        shape = tuple(meta.shape)
        value = torch.ones(shape) if len(shape) == 1 else torch.randn(shape, device=device, dtype=torch.bfloat16) * 0.03
        if name != "lm_head.weight" or not config.tie_word_embeddings:
            file = f"layer-{layer[2]}.safetensors" if layer else "rest.safetensors"
            tensors = files.setdefault(file, {})
            if is_packed and layer and len(shape) == 2:
                tensors |= _packed(name, *shape, device)
            else:
                tensors[name] = value.to(torch.bfloat16).cpu()
    folder.mkdir(parents=True)
    for file, tensors in files.items():
        save_file(tensors, folder / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, tensors in files.items() for name in tensors}}
    (folder / INDEX_NAME).write_text(json.dumps(index))
    config.save_pretrained(folder)
    if is_packed:
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"] = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}
        (folder / "config.json").write_text(json.dumps(config))
    return Checkpoint.open(folder)


def _packed(name: str, outputs: int, inputs: int, device: torch.device) -> dict[str, torch.Tensor]:
    """A matrix in AWQ's 4 bits, of numbers of about the size of those in 16."""
    num_groups = inputs // math.gcd(inputs, GROUP)  # a miniature's inputs are fewer than a group
    numbers, zeros = (
        torch.randint(0, 256, (rows, outputs // 2), dtype=torch.uint8, device=device).view(torch.int32)
        for rows in (inputs, num_groups)
    )
    scales = (torch.rand(num_groups, outputs, device=device) * 0.006).half()
    stem = name.removesuffix("weight")
    return {f"{stem}qweight": numbers.cpu(), f"{stem}qzeros": zeros.cpu(), f"{stem}scales": scales.cpu()}


def repeated(checkpoint: Checkpoint, num_layers: int, folder: Path) -> Checkpoint:
    """The model with more layers: layer i is layer i % n of the n on disk; writes its configuration to `folder`."""
    config = json.loads((checkpoint.path / "config.json").read_text())
    num_distinct, config["num_hidden_layers"] = config["num_hidden_layers"], num_layers
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {}
    for name, tensor in checkpoint.tensors.items():
        layer = LAYER_NAME.match(name)
        numbers = range(int(layer[2]), num_layers, num_distinct) if layer else ()
        names = [f"{layer[1]}{number}{layer[3]}" for number in numbers] if layer else [name]
        tensors.update({new: replace(tensor, name=new) for new in names})
    return Checkpoint(folder, tensors)


def planned(skeleton: Skeleton) -> list[LayerExtents]:
    """The extents to read for each layer."""
    return [plan_layer(f"layer {index}", slots) for index, slots in enumerate(skeleton.layer_slots)]


def placed(skeleton: Skeleton, machine: Machine, num_rows: int) -> Placement:
    """Place a model's layers and a KV slot of `num_rows` tokens in the machine's memory."""
    layers = planned(skeleton)
    sizes = [layer.num_bytes for layer in layers]
    on_host, rows, on_gpu = host_bytes(skeleton, machine.device.type), machine.rows, machine.device.type != "cpu"
    fixed = Fixed(
        resident_bytes(skeleton) - on_host,
        num_rows * skeleton.kv_shape().row_bytes,
        activation_bytes(skeleton.config, skeleton.kv_shape(), TargetLimits(rows, num_rows, num_rows, num_rows)),
        max(layer.scratch_bytes(skeleton.dtype, on_gpu) for layer in layers),
        host_embeddings=on_host,
    )
    budgets = Budgets(machine.device_memory, machine.host_memory, 3 * max(sizes), machine.max_resident)
    return place(sizes, fixed, budgets)


@contextmanager
def streamed(
    checkpoint: Checkpoint,
    machine: Machine,
    num_rows: int,
    kv_streams: DeviceStreams | None = None,
    elsewhere: Mapping[int, torch.device] | None = None,
    kv_elsewhere: Mapping[int, DeviceStreams] | None = None,
    placement: Placement | None = None,
) -> Iterator[StreamedModel]:
    """The model as a target runs it, with KV of `num_rows` tokens; with `kv_streams`, KV stays on the host.

    Layers `elsewhere` stay on other devices; `kv_elsewhere` are the streams for their KV. By default layers are placed
    next to this KV.
    """
    skeleton = build_skeleton(checkpoint, torch.bfloat16)
    placement = placement or placed(skeleton, machine, num_rows)
    if elsewhere:
        tiers_with = (Tier.ELSEWHERE if i in elsewhere else tier for i, tier in enumerate(placement.tiers))
        placement = replace(placement, tiers=tuple(tiers_with))
    with Tiers(planned(skeleton), placement, LINK_THREADS, machine.streams, elsewhere=elsewhere) as tiers:
        kv = OffloadedKV(skeleton.kv_shape(), num_rows, kv_streams, kv_elsewhere) if kv_streams else None
        yield StreamedModel(skeleton, tiers, machine.rows, machine.device, kv)
