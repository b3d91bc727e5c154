"""Experts that come to an accelerator from the host's memory: right in any order of work, the bits of whole layers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from bough.errors import ConfigError
from bough.sizing.placement import Budgets, Fixed, Tier, place_with_expert_cache
from loadtest.common.inline_streams import InlineStreams
from loadtest.common.tiny_model import save_model
from target_worker.experts.expert_cache import Expert
from target_worker.experts.expert_loaders import ExpertCopies
from target_worker.experts.expert_store import ExpertStore
from target_worker.link.device_ring import DeviceRing
from target_worker.link.layer_extents import LayerExperts, sizes_of
from target_worker.link.link_stats import CopyStats
from target_worker.sweep.tiers import numbered
from tests.cli.planning.test_plan import run
from tests.fakes.gpu.late_device import FakeStreams
from tests.fakes.model.families import FAMILIES
from tests.fakes.models import streamed
from tests.fakes.tiers import long_but
from tests.target_worker.experts.test_experts import MIXTURE, NUM_EXPERTS, SIZES, logits_of


class FakeHost:
    """Experts whose bytes are their numbers."""

    def __init__(self, size: int) -> None:
        self._size = size

    @contextmanager
    def layer(self, index: int) -> Iterator[torch.Tensor]:
        yield torch.full((self._size,), index, dtype=torch.uint8)

    def stays(self, index: int) -> bool:
        return True

    def restart(self) -> None: ...


class Rounds:
    """Sweeps that compute with experts' bytes whenever the streams please."""

    def __init__(self, layers: Mapping[int, LayerExperts], num_slabs: int, streams: FakeStreams) -> None:
        size = sizes_of(layers.values()).slab_bytes
        self.numbers, _ = numbered(layers, 100)
        self.traffic = CopyStats()
        shifts = {expert: 8 * (number % 2) for expert, number in self.numbers.items()}
        self.copies = ExpertCopies(FakeHost(size), self.numbers, shifts, size, num_slabs, streams, self.traffic)
        self.store = ExpertStore(layers, num_slabs, self.copies)
        self.ring = DeviceRing(range(len(layers)), [size] * len(layers), FakeHost(size), streams, num_slabs=2)
        self.right: list[bool] = []
        self.streams, self._num_layers = streams, len(layers)

    def sweep(self, numbers: Sequence[int], until: int | None = None) -> None:
        """What is left of each layer comes through a ring in the same stream."""
        for layer in range(self._num_layers)[:until]:
            self.store.begin(layer)
            with self.ring.layer(layer) as slab:
                self.streams.compute(lambda slab=slab, layer=layer: self.right.append(bool((slab == layer).all())))
                self.store.expect(layer, numbers)
                for number in numbers:
                    self._compute(Expert(layer, number))
                self.streams.compute(lambda slab=slab, layer=layer: self.right.append(bool((slab == layer).all())))

    def restart(self) -> None:
        self.store.restart()
        self.ring.restart()

    def _compute(self, expert: Expert) -> None:
        for data in self.store.bytes_of(expert, 0):
            self.streams.compute(lambda data=data: self.right.append(bool((data == self.numbers[expert]).all())))


@contextmanager
def rounds_of(layers: Mapping[int, LayerExperts], num_slabs: int, seed: int) -> Iterator[Rounds]:
    streams = FakeStreams(seed)
    try:
        rounds = Rounds(layers, num_slabs, streams)
        with rounds.ring:
            yield rounds
            streams.compute_event().synchronize()
        assert rounds.right
        assert all(rounds.right)
    finally:
        streams.close()


@pytest.mark.slow
@pytest.mark.parametrize("num_slabs", [6, 9, 24])
@pytest.mark.parametrize("seed", range(4))
def test_an_expert_is_complete_while_it_is_used(num_slabs: int, seed: int, layers: dict[int, LayerExperts]) -> None:
    """Also in sweeps that begin while one that was given up is still computed."""
    rng = np.random.default_rng(seed)
    with rounds_of(layers, num_slabs, seed) as rounds:
        for number in range(24):
            chosen = rng.choice(6, size=rng.integers(1, 7), replace=False).tolist()
            rounds.sweep(chosen, until=2 if number % 5 == 4 else None)
            if number % 5 == 4:
                rounds.restart()


def test_a_turn_is_queued_without_waiting_for_the_device(layers: dict[int, LayerExperts]) -> None:
    with rounds_of(layers, 6, 0) as rounds:
        rounds.streams.hold(True)
        rounds.sweep([0, 1, 2, 3, 4, 5])
        rounds.sweep([0, 1, 2])
        assert not rounds.right
        rounds.streams.hold(False)


def test_present_experts_are_not_copied_again_and_few_are_prefetched(
    layers: dict[int, LayerExperts], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While copies are outstanding beyond a limit nothing is guessed: what is wanted next would come after them."""
    size = sizes_of(layers.values()).slab_bytes
    monkeypatch.setattr("target_worker.experts.expert_loaders.PREFETCH_BYTES", 2 * size)
    with rounds_of(layers, 24, 0) as rounds:
        for _ in range(5):
            rounds.sweep(range(6))
        rounds.streams.compute_event().synchronize()
        assert rounds.traffic.figures().link_bytes == 24 * size
    with rounds_of(layers, 12, 0) as rounds:
        assert rounds.copies.max_prefetches == 2
        for _ in range(5):
            rounds.sweep(range(6))
        rounds.streams.compute_event().synchronize()
        rounds.streams.hold(True)
        rounds.sweep(range(6), until=1)
        assert rounds.copies.max_prefetches == 0
        rounds.streams.hold(False)


class WholeLayers(NamedTuple):
    """A mixture of four layers, and its logits where layers come whole."""

    family: str
    folder: Path
    wanted: list[torch.Tensor]


@pytest.fixture(scope="module", params=NUM_EXPERTS)
def whole_layers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> WholeLayers:
    folder = save_model(tmp_path_factory.mktemp("mixture"), FAMILIES[request.param])
    with streamed(folder, torch.bfloat16) as model:
        return WholeLayers(request.param, folder, logits_of(model, *SIZES))


@pytest.mark.slow
@pytest.mark.parametrize("max_resident", long_but([2], [0, 2, 40]))
def test_bits_equal_those_of_whole_layers(whole_layers: WholeLayers, max_resident: int) -> None:
    """With the rest of the layers on the device, in the host's memory and on disk."""
    family, folder, wanted = whole_layers
    for num_slabs in (NUM_EXPERTS[family], NUM_EXPERTS[family] + 3):
        apart = streamed(
            folder, torch.bfloat16, 16, max_resident, InlineStreams(), host_layers=3, expert_slabs=num_slabs
        )
        with apart as model:
            for mine, right in zip(logits_of(model, *SIZES), wanted, strict=True):
                assert torch.equal(mine, right)
            assert model.tiers.figures().link_bytes > 0


def test_experts_on_the_host_are_copied_when_chosen() -> None:
    """Otherwise layers come whole, as if nothing had been said; or it is said what would do."""
    fixed, little, much = Fixed(1000, 0, 0, 0), Budgets(3000, 7999, 2000, 10), Budgets(3000, 8100, 2000, 10)
    placement = place_with_expert_cache(*MIXTURE, fixed, much, from_host=True, is_forced=True)
    assert (placement.fixed.experts, placement.fixed.host_experts) == (1500, 8000)
    assert (placement.device_bytes, placement.host_bytes) == (3000, 8000)
    assert placement.layers(Tier.RESIDENT) == tuple(range(10))
    for too_little in (little, Budgets(3000, 8050, 2000, 2)):  # the second holds experts, and no slabs for the rest
        assert place_with_expert_cache(*MIXTURE, fixed, too_little, from_host=True).expert_bytes == 0
    whole = place_with_expert_cache(*MIXTURE, fixed, little, from_host=True)
    assert (whole.expert_bytes, whole.layer_bytes) == (0, tuple(MIXTURE[0]))
    with pytest.raises(
        ConfigError, match=r"--host-memory: must be at least .* for --experts chosen.*or use --experts all"
    ):
        place_with_expert_cache(*MIXTURE, fixed, little, from_host=True, is_forced=True)


def test_a_plan_includes_the_hosts_link(
    mixture: Path, layers: dict[int, LayerExperts], capsys: pytest.CaptureFixture[str]
) -> None:
    slots = [slot for layer in layers.values() for slot in layer.slots]
    flags = ["--device", "gpu", "--device-memory", "9MB", "--kv-memory", "1MB", "--max-context", "128"]
    flags += ["--max-nodes", "64", "--host-link-speed", "2", "--compute-speed", "1"]
    flags += ["--link-speed", "1", "--memory-speed", "9", "--resident-layers", "0", "--host-memory", "1GB"]
    plan = run(capsys, str(mixture), *flags)
    on_host = plan["fixed_bytes"]["host_experts"]
    assert plan["host_bytes"] > on_host == sum(math.prod(slot.source.shape) * 4 for slot in slots)
    seconds = {sweep["tokens"]: sweep["link_seconds"] for sweep in plan["sweeps"]}
    missing = on_host - plan["fixed_bytes"]["experts"]
    assert seconds[64] - seconds[1] == pytest.approx(missing / 2e9 * 0.5, rel=0.3)
