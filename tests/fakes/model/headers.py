"""Checkpoints of any size that have headers and no data: their files are sparse."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path

from transformers import PretrainedConfig

from bough.model.architecture.architecture import build_empty, load_config
from bough.model.checkpoint.safetensors_folder import SINGLE_NAME
from bough.model.checkpoint.tensor_source import STORED_DTYPES
from bough.model.loading.loading import DTYPES
from bough.model.quant.formats import SAMPLES

PARTS = {"awq": ("qweight", "qzeros", "scales"), "gptq": ("qweight", "qzeros", "scales", "g_idx")}  # in samples' order


def write_headers(folder: Path, config: PretrainedConfig, sample: str = "") -> Path:
    """Write a model's configuration, and headers of its weights, whose layers' matrices are stored as a sample."""
    config.save_pretrained(folder)
    own = load_config(folder)
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, value in build_empty(own, DTYPES["float16"]).state_dict().items():
        if not (sample and value.dim() == 2 and ".layers." in name):
            tensors[name] = "F16", tuple(value.shape)
            continue
        places = SAMPLES[sample](*value.shape).places
        for part, place in zip(PARTS[sample.split()[0]], places, strict=False):
            tensors[f"{name.removesuffix('.weight')}.{part}"] = place.dtype, place.shape
    _write(folder / SINGLE_NAME, tensors)
    return folder


def _write(file: Path, tensors: dict[str, tuple[str, tuple[int, ...]]]) -> None:
    header, end = {}, 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + math.prod(shape) * STORED_DTYPES[dtype].itemsize
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    content = json.dumps(header).encode()
    content += b" " * (-len(content) % 8)  # tensors are aligned, as the library has them
    file.write_bytes(struct.pack("<Q", len(content)) + content)
    with file.open("r+b") as stream:
        stream.truncate(8 + len(content) + end)
