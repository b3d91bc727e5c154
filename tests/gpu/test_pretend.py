"""The pretended device itself: what would be wrong on a GPU must be wrong here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from bough.model.running.device import working_on
from loadtest.common.tiny_model import save_model
from target_worker.kv.kv_offload import _Stage
from target_worker.link.device_ring import DeviceRing
from target_worker.link.streams import DeviceEvent
from tests.fakes.gpu.device_sweeps import Where, on_device, on_the_device, three_sweeps
from tests.fakes.gpu.pretend import device, kernel, notes, pretending
from tests.fakes.gpu.pretend_streams import NEVER, PretendedStreams
from tests.fakes.model.families import FAMILIES
from tests.fakes.models import CPU


def test_two_memories_are_not_mixed() -> None:
    with pretending():
        mine = torch.ones(3).to(device())
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            mine + torch.ones(3)
        with pytest.raises(TypeError, match="can't convert"):
            mine.numpy()
        assert torch.equal((mine + 1).cpu(), torch.full((3,), 2.0))


def test_unwritten_memory_is_nan() -> None:
    with pretending():
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            assert torch.empty(5, dtype=dtype, device=device()).isnan().all().cpu()


def test_synchronisations_of_the_device_are_counted() -> None:
    with pretending():
        mine = torch.tensor([1.0, 2.0], device=device())
        assert (len(notes.stops), len(notes.sends)) == (0, 1)
        assert float(mine.sum()) == 3.0
        assert notes.stops == ["_local_scalar_dense"]
        mine[torch.tensor([1])]
        assert len(notes.sends) == 2


def test_numbers_of_a_graph_cannot_be_read_during_capture() -> None:
    with pretending():
        mine = torch.ones(2).to(device())
        notes.is_capturing = True
        with pytest.raises(RuntimeError, match="stream is capturing"):
            mine.cpu()


def test_a_copy_is_made_when_it_is_waited_for() -> None:
    with pretending():
        streams = PretendedStreams(NEVER)
        source, target = torch.arange(4, dtype=torch.uint8), streams.device_memory(4)
        copy = streams.copy(source, target, None)
        assert not copy.done.query()
        assert target.raw[0] == 255
        streams.compute_after(copy.done)
        assert torch.equal(target.cpu(), source)
        assert not notes.order.races


class RecycledStreams(PretendedStreams):
    """Its memory was just released by a computation that is not over, as in torch's allocator."""

    def device_memory(self, num_bytes: int) -> torch.Tensor:
        return super().device_memory(num_bytes).fill_(1)


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_reused_memory_is_waited_for(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_model(tmp_path / "model", FAMILIES[family])
    monkeypatch.setattr("tests.fakes.gpu.device_sweeps.PretendedStreams", RecycledStreams)
    slabs = 8 if family == "mixtral" else 0
    mine = on_device(folder, Where(0, 4, kv_on_host=True, expert_slabs=slabs, elsewhere=(1,)), torch.float32)
    assert not mine.isnan().any(), "nothing was computed from what nobody had written"


def test_a_kernel_is_launched_on_its_operands_device() -> None:
    """On a GPU it would be launched on the current one, which may not reach them."""
    with pretending():
        act = kernel(torch.Tensor.numel)
        with pytest.raises(AssertionError, match="launched on pretend:0 over memory of pretend:1"):
            act(torch.ones(2).to(device(1)))
        with working_on(device(1)):
            act(torch.ones(2).to(device(1)))


def forget(self: PretendedStreams, event: DeviceEvent) -> None:
    """A wait that is missing."""


def free_at_once(self: DeviceRing, computed: DeviceEvent) -> None:
    """Slabs that are not waited for."""
    reset(self, computed)
    self._free_after = _Nobody([computed] * len(self._slabs))


class _Nobody(list[DeviceEvent]):
    def __setitem__(self, *_: object) -> None:
        pass


def take_back_at_once(self: _Stage, layer: int, computed: DeviceEvent) -> None:
    """What a layer adds is copied without regard to whether it is there."""
    take_back(self, layer, None)


reset, take_back = DeviceRing._reset, _Stage._copy_out


@pytest.mark.parametrize(
    ("owner", "name", "broken"),
    [
        (PretendedStreams, "compute_after", forget),
        (DeviceRing, "_reset", free_at_once),
        (_Stage, "_copy_out", take_back_at_once),
    ],
)
def test_a_missing_event_is_found_in_either_order(
    owner: type, name: str, broken: Callable[..., object], tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, broken)
    where = Where(max_resident=0, host_layers=4, kv_on_host=True)
    with pretending(), on_the_device(tiny, where, torch.float32) as model:
        three_sweeps(model, CPU)
        assert notes.order.races
