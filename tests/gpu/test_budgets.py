"""What a sweep may ask of a GPU: to be waited for once, to be sent nothing within a layer, and few launches."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from loadtest.common.packed_model import pack
from loadtest.common.tiny_model import save_model
from tests.fakes.gpu.device_sweeps import Where, on_the_device, three_sweeps
from tests.fakes.gpu.pretend import Notes, device, notes, pretending
from tests.fakes.model.families import FAMILIES
from tests.fakes.model.packed_files import in_words, stored_as
from tests.fakes.model.published_formats import FORMATS

DENSE_LAUNCHES = 57  # of a layer of a Llama and a chunk of rows, in 16 bits, with its share of what is around layers
LOGITS_LAUNCHES = 8  # of a sweep, for each row's largest logit
MOST_SENDS = 9  # tokens, positions, paths, and which rows are wanted, before the first layer
SENDS_ELSEWHERE = 6  # paths, to another device


def counted(folder: Path, where: Where, rows: int, kv: torch.device) -> tuple[Notes, int]:
    """Of one sweep of 31 rows, after one that made what is made once; and the number of layers."""
    with pretending(), on_the_device(folder, where, torch.bfloat16, rows) as model:
        three_sweeps(model, kv, counting=True)
        return notes, len(model.tiers.layers)


@pytest.mark.parametrize("kv_on_host", [False, True])
@pytest.mark.parametrize("elsewhere", [(), (1,), (2, 3)])
def test_a_dense_sweep_waits_once_and_sends_nothing_within_a_layer(
    kv_on_host: bool, elsewhere: tuple[int, ...], tiny: Path
) -> None:
    kv = torch.device("cpu") if kv_on_host else device()
    seen, _ = counted(tiny, Where(kv_on_host=kv_on_host, elsewhere=elsewhere), 64, kv)
    assert len(seen.stops) == 1, seen.stops
    assert seen.stops[0].startswith("_to_copy"), "the logits, at the end"
    assert not seen.inside
    assert len(seen.sends) <= MOST_SENDS + (SENDS_ELSEWHERE if elsewhere else 0), seen.sends


def test_a_layer_is_launched_in_few_pieces(tiny: Path) -> None:
    seen, num_layers = counted(tiny, Where(), 64, device())
    assert sum(seen.launches.values()) <= num_layers * DENSE_LAUNCHES + LOGITS_LAUNCHES, seen.launches


def test_a_packed_layer_costs_a_launch_more_for_each_matrix(tiny: Path, tmp_path: Path) -> None:
    """By way of torch's operators it was hundreds."""
    pack(tiny, 4, tmp_path / "packed")
    plain, num_layers = counted(tiny, Where(), 64, device())
    num_plain = sum(plain.launches.values())
    packed, _ = counted(tmp_path / "packed", Where(), 64, device())
    assert packed.launches["write_along"] == 7 * num_layers
    assert sum(packed.launches.values()) <= num_plain + 7 * num_layers


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "is_ordered"),
    [("compressed-tensors", True), ("awq", True), ("gptq", True), ("gptq", False), ("FP8, blocks", True)],
)
def test_a_packed_sweep_waits_once_and_sends_nothing_within_a_layer(
    method: str, is_ordered: bool, tiny: Path, tmp_path: Path
) -> None:
    folder = tmp_path / method
    if method == "compressed-tensors":
        pack(tiny, 4, folder)
    elif method in FORMATS:
        folder, _ = stored_as(method, tiny, tmp_path, torch.float32)
    else:
        in_words(folder, method, is_ordered, tiny)
    seen, _ = counted(folder, Where(), 64, device())
    assert len(seen.stops) == 1, seen.stops
    assert not seen.inside


@pytest.mark.parametrize("kv_on_host", [False, True])
def test_recurrent_layers_get_their_steps_once_and_take_them_in_one_launch(kv_on_host: bool, tmp_path: Path) -> None:
    """Two trees, and the token that one session has accepted before: a launch each in each of three layers."""
    folder = save_model(tmp_path / "model", FAMILIES["qwen3.5, recurrent layers"])
    kv = torch.device("cpu") if kv_on_host else device()
    seen, _ = counted(folder, Where(kv_on_host=kv_on_host), 64, kv)
    assert len(seen.stops) == 1, seen.stops
    assert seen.launches["take_steps"] == 3 * 3
    assert len(seen.inside) == 3 * 3, "rows, their steps, what the convolution reads for each; in the first layer alone"


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mixtral", "qwen2 moe, shared expert"])
@pytest.mark.parametrize("elsewhere", [(), (1,)])
@pytest.mark.parametrize("rows", [64, 16])
def test_a_mixture_waits_once_for_the_routers_of_a_layer(
    family: str, elsewhere: tuple[int, ...], rows: int, tmp_path: Path
) -> None:
    """However many chunks of rows there are, and nothing is sent there."""
    folder = save_model(tmp_path / "model", FAMILIES[family])
    seen, num_layers = counted(folder, Where(expert_slabs=8, elsewhere=elsewhere), rows, device())
    assert len(seen.stops) <= num_layers + 1, seen.stops
    assert set(seen.inside) == {"tolist"}, "numbers of rows that chose each expert"


def test_an_expert_is_computed_once_for_all_chunks(tmp_path: Path) -> None:
    """A second chunk costs what is around its experts, and not these once more."""
    folder = save_model(tmp_path / "model", FAMILIES["mixtral"])
    one, two = (counted(folder, Where(expert_slabs=8), rows, device())[0].launches for rows in (64, 16))
    assert one["index_add_"] == two["index_add_"] > 0
