"""The memory that a sweep takes on a device is at most what is set aside for it."""

from __future__ import annotations

import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from bough.model.batch.batch import Batch, Segment
from bough.model.kv.session_kv import KVArena
from bough.model.sizes.memory_budget import activation_bytes
from bough.model.sizes.target_limits import TargetLimits
from bough.trees.tree import Tree
from loadtest.common.tiny_model import save_model
from tests.fakes.gpu import pretend
from tests.fakes.gpu.device_sweeps import Where, on_the_device
from tests.fakes.gpu.pretend import Pretended, device, pretending
from tests.fakes.model.families import of_two_layers


class Peak:
    """Bytes of all memory on the device that tensors hold: now, and at most."""

    def __init__(self) -> None:
        self._holders = Counter[int]()
        self.now = self.most = 0

    def add(self, tensor: Pretended) -> None:
        memory = tensor.raw.untyped_storage()
        number, size = memory._cdata, memory.nbytes()
        self._holders[number] += 1
        self.now += size if self._holders[number] == 1 else 0
        self.most = max(self.most, self.now)
        weakref.finalize(tensor, self._drop, number, size)

    def _drop(self, number: int, size: int) -> None:
        self._holders[number] -= 1
        self.now -= size if not self._holders[number] else 0


@pytest.fixture
def peak(monkeypatch: pytest.MonkeyPatch) -> Peak:
    found, make = Peak(), Pretended.__new__

    def made(cls: type[Pretended], *args: Any) -> Pretended:
        tensor = make(cls, *args)
        found.add(tensor)
        return tensor

    monkeypatch.setattr(pretend.Pretended, "__new__", staticmethod(made))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "num_nodes", "vocab_size"),
    [
        ("llama", 2048, 264),
        ("llama", 700, 8192),
        ("gemma2, soft-capping, alternating windows", 700, 8192),
        ("mixtral", 2048, 264),
        ("gpt-oss, sinks, alternating windows", 2048, 264),
    ],
)
def test_a_sweep_takes_no_more_than_its_estimate(
    family: str, num_nodes: int, vocab_size: int, peak: Peak, tmp_path: Path
) -> None:
    """Rows in parts of 256, their hidden states or their logits being most of it."""
    config = of_two_layers(family)
    config.vocab_size = vocab_size
    tree = Tree.of([1] * num_nodes, [-1] + [0] * (num_nodes - 1), [0.0] * num_nodes)
    with pretending(), on_the_device(save_model(tmp_path / "model", config), Where(9), torch.bfloat16, 256) as model:
        shape = model.skeleton.kv_shape()
        slot = KVArena(shape, shape.empty(num_nodes, device())).take(num_nodes)
        batch = Batch([Segment.tree(slot, 0, tree)], model.rows, model.device)
        peak.most = before = peak.now
        model.sweep(batch)
        taken = peak.most - before
        limits = TargetLimits(256, num_nodes, num_nodes, num_nodes)
        assert 0.5 < taken / activation_bytes(config, shape, limits) < 1
