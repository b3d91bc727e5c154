"""Weights on the device begin at multiples of 16 bytes, wherever a file has them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from loadtest.common.inline_streams import InlineStreams
from target_worker.experts.expert_loaders import ExpertCopies
from target_worker.link.link_stats import CopyStats
from tests.fakes.gpu.device_sweeps import Where, on_cpu, on_the_device, require_close, three_sweeps
from tests.fakes.gpu.pretend import device, notes, pretending


def shifted(folder: Path, to: Path, by: int) -> Path:
    """The same model, its tensors so many bytes behind a multiple of 16."""
    to.mkdir()
    for file in folder.iterdir():
        data = file.read_bytes()
        if file.suffix == ".safetensors":
            size = int(np.frombuffer(data[:8], "<u8")[0])
            header = json.dumps(json.loads(data[8 : 8 + size])).encode()
            header += b" " * (-(8 + len(header) - by) % 16)
            data = np.uint64(len(header)).tobytes() + header + data[8 + size :]
        (to / file.name).write_bytes(data)
    return to


@pytest.mark.parametrize("by", [0, 8])
def test_a_layer_s_matrices_begin_where_products_want_them(by: int, tiny: Path, tmp_path: Path) -> None:
    folder = shifted(tiny, tmp_path / "shifted", by)
    places = set()
    with pretending(), on_the_device(folder, Where(), torch.float32) as model:
        for index, layer in enumerate(model.skeleton.layers):
            with model.tiers.layer(index) as slab:
                model._bind(index, slab)
                places |= {parameter.data_ptr() % 16 for parameter in layer.parameters()}
    assert places == {0}


def test_what_comes_of_it_is_the_same(tiny: Path, tmp_path: Path) -> None:
    found = []
    for by in (0, 8):
        folder = shifted(tiny, tmp_path / f"by {by}", by)
        with pretending(), on_the_device(folder, Where(), torch.float32) as model:
            found.append(three_sweeps(model, device()))
        assert not notes.order.races
    assert torch.equal(*found)
    require_close(found[0], on_cpu(tiny, torch.float32))


def test_slabs_of_experts_are_aligned_as_whole_layers_are() -> None:
    """A library that chooses kernels by alignment then gives the same bits for either."""
    host: Any = None
    copies = ExpertCopies(host, {}, {}, 4096, 3, InlineStreams(), CopyStats())
    assert copies._slabs.stride(0) % 512 == 0
