"""Layers of a target on a second device: hidden states cross, twice for each run of such layers, without waiting."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bough.config.processes import TargetConfig, parse
from bough.errors import ConfigError
from bough.model.kv.session_kv import KVShape, KVSlot, split_memory
from bough.model.sizes.memory_budget import other_devices
from bough.sizing.placement import (
    Budgets,
    ExpertSizes,
    Fixed,
    OtherDevice,
    Placement,
    SeparateExperts,
    Tier,
    place,
    place_with,
)
from target_worker.sweep.held_layers import choose_places
from tests.fakes.gpu.device_sweeps import Where, on_the_device, three_sweeps
from tests.fakes.gpu.pretend import device, notes, pretending
from tests.fakes.model.headers import write_headers
from tests.model.sizes.test_memory_on_a_gpu import AWQ, llama_70b, placed

GB = 1000**3
CPU = torch.device("cpu")


@pytest.mark.parametrize(("elsewhere", "num_crossings"), [((2, 3), 2), ((1,), 2), ((0, 2), 4)])
def test_only_hidden_states_and_their_context_cross_between_devices(
    elsewhere: tuple[int, ...], num_crossings: int, tiny: Path
) -> None:
    where = Where(max_resident=1, elsewhere=elsewhere)
    with pretending(), on_the_device(tiny, where, torch.bfloat16, 64) as model:
        three_sweeps(model, device(), counting=True)
    hidden = [crossing for crossing in notes.crossings if "(1, 31, 64)" in crossing]
    assert len(hidden) == num_crossings, notes.crossings
    assert len(notes.crossings) <= num_crossings + 3, "two tables of positions, and positions"
    assert len(notes.stops) == 1, notes.stops
    assert not notes.inside


def test_slots_move_and_copy_layers_on_all_devices() -> None:
    shape, kept = KVShape(3, 2, 4, torch.float32), torch.randn(3, 6, 2, 4)
    with pretending():
        whole, split = shape.empty(20, CPU), split_memory(shape, 20, device(), {1: device(1)})
        slots = []
        for memory in (whole, split):
            slot, other = KVSlot(shape, 0, CPU), KVSlot(shape, 0, CPU)
            slot.place(memory, 2, 10)
            other.place(memory, 11, 20)
            for layer in range(3):
                for held in (slot.keys, slot.values):
                    held[layer, :6] = kept[layer] if memory is whole else kept[layer].to(held[layer].device)
            slot.compact([0, 1, 4], [7, 8, 9])
            slot.move(0, 8, 3)
            other.fork(slot, 2)
            slots.append((slot, other))
        assert split.keys.shape == whole.keys.shape
        for mine, theirs in zip(slots[1], slots[0], strict=True):
            for layer in range(3):
                assert mine.keys[layer].device == device(layer % 2)
                held = slice(0, theirs.length)
                assert torch.equal(mine.keys[layer][held].cpu(), theirs.keys[layer][held])
                assert torch.equal(mine.values[layer][held].cpu(), theirs.values[layer][held])


@pytest.fixture(scope="module")
def awq_70b(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The headers of a 70B in 4 bits."""
    folder = tmp_path_factory.mktemp("awq") / "70b"
    return write_headers(folder, llama_70b(dtype="float16", quantization_config=AWQ), "awq 4 bits")


def test_two_cards_of_24_gb_hold_a_70b_in_4_bits(awq_70b: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = placed(monkeypatch, awq_70b, "--max-context", "2048")
    both = placed(monkeypatch, awq_70b, "--max-context", "2048", "--resident-devices", "cuda:1=23GB")
    assert alone.streamed
    assert not both.streamed
    assert both.num_slabs == 0
    elsewhere = both.layers(Tier.ELSEWHERE)
    assert elsewhere == tuple(range(80 - len(elsewhere), 80)), "in one run: hidden states cross twice"
    assert both.device_bytes <= alone.device_bytes


def test_with_kv_on_the_host_a_second_card_holds_more_layers(awq_70b: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first card's stage for it is two layers' room, however many layers are elsewhere."""
    flags = "--max-context", "2048", "--kv-sessions", "8"
    alone = placed(monkeypatch, awq_70b, *flags, "--kv-tier", "host")
    there, here = (
        placed(monkeypatch, awq_70b, *flags, "--resident-devices", "cuda:1=12GB", "--kv-tier", tier)
        for tier in ("device", "host")
    )
    assert len(here.layers(Tier.ELSEWHERE)) >= len(there.layers(Tier.ELSEWHERE)) + 3
    assert (here.fixed.host_kv, here.fixed.kv) == (alone.fixed.host_kv, alone.fixed.kv)
    assert here.fixed.host_kv > 5 * GB
    assert here.link_bytes < min(alone.link_bytes, there.link_bytes)


def test_experts_are_placed_on_the_first_card_and_other_cards_hold_whole_layers() -> None:
    sizes, apart = [850] * 10, SeparateExperts([50] * 10, ExpertSizes(100, 8, 80, 8000), scratch=7)
    for forced, budgets in ((True, Budgets(3000, 5600, 500, 10)), (False, Budgets(3000, 9999, 500, 10))):
        found = place_with(sizes, Fixed(1000, 0, 0, 0), budgets, [other(2700, 100)], apart, True, forced)
        assert found.tiers == (Tier.RESIDENT,) * 7 + (Tier.ELSEWHERE,) * 3
        assert found.layer_bytes == (50,) * 7 + (850,) * 3
        assert (found.expert_bytes, found.fixed.host_experts, found.fixed.scratch) == (5600, 5600, 7)
        assert found.fixed.experts == 1600, "of the 3000 bytes, 1357 are taken"
        assert found.num_crossings == 2
        assert found.device_bytes <= 3000
    with pytest.raises(ConfigError, match=r"^--host-memory: must be at least .* for --experts chosen"):
        place_with(
            sizes, Fixed(1000, 0, 0, 0), Budgets(3000, 5599, 2000, 10), [other(2700, 100)], apart, True, is_forced=True
        )


@pytest.mark.parametrize(
    ("num_dense", "budgets", "expert_bytes", "layer_bytes"),
    [
        (2, Budgets(3000, 9999, 500, 10), 5 * 800, (50,) * 7 + (850,) * 3),
        (0, Budgets(3000, 5000, 1700, 10), 0, (850,) * 10),
    ],
    ids=["layers without experts count none", "where the host cannot hold experts, layers are whole"],
)
def test_experts_stay_on_the_host_if_it_holds_all_of_them(
    num_dense: int, budgets: Budgets, expert_bytes: int, layer_bytes: tuple[int, ...]
) -> None:
    num_experts = 8 * (10 - num_dense)
    sizes = [50] * num_dense + [850] * (10 - num_dense)
    apart = SeparateExperts([50] * 10, ExpertSizes(100, 8, num_experts, 100 * num_experts))
    found = place_with(sizes, Fixed(1000, 0, 0, 0), budgets, [other(2700, 100)], apart)
    assert (found.expert_bytes, found.layer_bytes) == (expert_bytes, layer_bytes)
    assert len(found.layers(Tier.ELSEWHERE)) == 3


@pytest.mark.parametrize(("hop_bytes", "num_crossings"), [(0, 20), (GB // 4000, 20), (GB // 12, 8), (GB, 2)])
def test_larger_hidden_states_give_fewer_runs_of_layers(hop_bytes: int, num_crossings: int) -> None:
    """There and back at half the link's speed, they take no more than a twentieth of what layers do."""
    budgets, one = Budgets(5 * GB, 60 * GB, 2 * GB, 99), OtherDevice("cuda:1", 10 * GB, 0, 0, hop_bytes)
    found = place_with([GB] * 40, Fixed(0, 0, 0, 0), budgets, [one])
    assert len(found.layers(Tier.ELSEWHERE)) == 10
    assert found.num_crossings == num_crossings
    assert hop_bytes == GB or num_crossings * 2 * hop_bytes <= 0.05 * found.link_bytes


@pytest.mark.parametrize(
    ("tiers", "others", "num_crossings"),
    [("rrrr", (), 0), ("reer", (0, 0), 2), ("reer", (0, 1), 3), ("erre", (0, 0), 4)],
)
def test_crossings_between_any_two_devices_are_counted(tiers: str, others: tuple[int, ...], num_crossings: int) -> None:
    named = tuple(Tier.RESIDENT if tier == "r" else Tier.ELSEWHERE for tier in tiers)
    assert Placement(named, (1,) * 4, Fixed(0, 0, 0, 0), 0, others=others).num_crossings == num_crossings


def test_more_memory_than_another_card_has_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("target_worker.sweep.held_layers.free_device_bytes", lambda _: 9 * GB)
    settings = parse(TargetConfig, "t", ["--model", "m", "--device-memory", "8GB"], {})
    wanted = r"^--resident-devices: cuda:1 must be at most the 9.00 GB that are free there, got 10.00 GB$"
    with pytest.raises(ConfigError, match=wanted):
        choose_places([GB] * 4, Fixed(0, 0, 0, 0), settings, torch.device("cuda", 0), others=[other(10 * GB)])


def other(budget: int, fixed: int = 0, layer_kv: int = 0) -> OtherDevice:
    return OtherDevice("cuda:1", budget, fixed, layer_kv)


def test_layers_on_other_devices_do_not_stream() -> None:
    sizes, budgets = [GB] * 20, Budgets(8 * GB, 20 * GB, 2 * GB, 99)
    before = place(sizes, Fixed(0, 2 * GB, 0, 0), budgets)
    after = place_with(sizes, Fixed(0, 2 * GB, 0, 0), budgets, [other(6 * GB + 1, GB, GB // 4)])
    assert len(after.layers(Tier.ELSEWHERE)) == 4
    assert after.others == (0,) * 4
    assert after.fixed.kv == 2 * GB * 16 // 20
    assert len(after.streamed) <= len(before.streamed) - 4
    assert after.device_bytes <= 8 * GB
    assert sorted((*after.layers(Tier.RESIDENT), *after.layers(Tier.ELSEWHERE), *after.streamed)) == [*range(20)]


def test_devices_are_filled_in_the_given_order() -> None:
    placement = place_with(
        [GB] * 12, Fixed(0, 0, 0, 0), Budgets(4 * GB, 20 * GB, 2 * GB, 99), [other(3 * GB), other(2 * GB)]
    )
    assert placement.others == (0, 0, 0, 1, 1)


def test_a_card_that_holds_no_layer_is_refused() -> None:
    wanted = r"^--resident-devices: cuda:1 must be at least 1.75 GB, for one layer of 1.00 GB, .*, got 1.00 GB$"
    with pytest.raises(ConfigError, match=wanted):
        place_with([GB] * 12, Fixed(0, 0, 0, 0), Budgets(4 * GB, 0, 2 * GB, 99), [other(GB, GB // 2, GB // 4)])


@pytest.mark.parametrize(
    ("devices", "wanted"),
    [
        ("cuda:1", r"resident-devices: must be .*cuda:1=10GB,cuda:2=8GB, got 'cuda:1'"),
        ("cpu=1GB", r"resident-devices: must be .*, got 'cpu=1GB'"),
        ("cuda:1=1GB,cuda:1=2GB", r"resident-devices: must name each GPU once, got"),
        ("cuda:0=1GB", r"^--resident-devices: must be of cuda:1, got cuda:0=1000000000$"),
        ("cuda:2=1GB", r"^--resident-devices: must be of cuda:1, got cuda:2=1000000000$"),
    ],
)
def test_devices_that_cannot_hold_layers_are_refused_by_name(devices: str, wanted: str) -> None:
    flags = ["--model", "m", "--kv-memory", "8GB", "--resident-devices", devices]
    with pytest.raises(ConfigError, match=wanted):
        other_devices(
            parse(TargetConfig, "t", flags, {}), llama_70b(), KVShape(80, 8, 128, torch.float16), 0, "cuda:0", 2
        )
