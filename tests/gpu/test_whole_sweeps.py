"""Whole sweeps over the path for GPUs, on a pretended device: right, in every order of work that events allow."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig

from bough.model.backend import computing_by
from bough.model.gpu import unpack_triton
from bough.model.loading.loading import can_wait
from loadtest.common.inline_streams import InlineStreams
from loadtest.common.packed_model import pack
from loadtest.common.tiny_model import TINY, save_model
from target_worker.experts.expert_loaders import ExpertCopies
from target_worker.link.layer_extents import LayerExtents
from target_worker.link.link_stats import CopyStats
from tests.fakes.gpu import unpacking
from tests.fakes.gpu.device_sweeps import (
    Where,
    on_cpu,
    on_device,
    on_the_device,
    one_sweep,
    require_close,
    three_sweeps,
)
from tests.fakes.gpu.pretend import device, notes, pretending
from tests.fakes.gpu.pretend_streams import ALWAYS, NEVER
from tests.fakes.model.families import FAMILIES, KINDS, MIXTURES, of_two_layers
from tests.fakes.model.packed_files import packed_as
from tests.fakes.tiers import long_but

# Parts that remain transformers' own: LayerNorm, rotation by complex numbers, and one kind of gate.
REMAINING = {
    "norm": {"starcoder2, biases"},
    "rotate": {"deepseek v2, no rank of queries"},
    "gate": {"starcoder2, biases", "gpt-oss, sinks, alternating windows"},
}
OTHER_MIXTURES = [name for name in MIXTURES if not hasattr(FAMILIES[name], "kv_lora_rank")]


@pytest.mark.slow
@pytest.mark.parametrize("family", long_but(KINDS, FAMILIES))
def test_every_family_gives_the_cpus_results(family: str, tmp_path: Path) -> None:
    """On a device whose unwritten memory is NaN; and its norms, rotations and gates are the backend's."""
    folder = save_model(tmp_path / "model", of_two_layers(family))
    found = on_device(folder, Where(), torch.float32)
    assert {part for part in REMAINING if not notes.launches[part]} == {
        part for part, families in REMAINING.items() if family in families
    }
    assert "mean" not in notes.launches, "a sum over a row, whose order depends on the number of rows"
    require_close(found, on_cpu(folder, torch.float32))


@pytest.mark.parametrize("family", ["gemma2, soft-capping, alternating windows", "gemma3, local and global"])
def test_embeddings_that_stay_on_the_host_are_scaled_there(family: str, tmp_path: Path) -> None:
    """Gemma's are, by the root of the hidden size, where its head is a matrix of its own."""
    config = of_two_layers(family)
    config.tie_word_embeddings = False
    folder = save_model(tmp_path / "model", config)
    require_close(on_device(folder, Where(), torch.float32), on_cpu(folder, torch.float32))


@pytest.mark.slow
@pytest.mark.parametrize("family", long_but(["mixtral"], OTHER_MIXTURES))
def test_experts_that_stream_when_chosen(family: str, tmp_path: Path) -> None:
    """Copied from the host's memory as late as may be."""
    folder = save_model(tmp_path / "model", of_two_layers(family))
    mine = on_device(folder, Where(expert_slabs=8, chance=NEVER), torch.float32)
    require_close(mine, on_cpu(folder, torch.float32))


PLACES = {
    "all layers come from disk, through the host": Where(max_resident=0, host_layers=2),
    "all stay in the host's memory": Where(max_resident=0, host_layers=4),
    "all stay on the device": Where(max_resident=4),
    "keys and values are the host's": Where(kv_on_host=True),
    "a second device has the last two": Where(max_resident=1, elsewhere=(2, 3)),
    "a second device has one between others": Where(max_resident=0, elsewhere=(1,)),
    "a second device has all": Where(max_resident=0, elsewhere=(0, 1, 2, 3)),
    "keys and values are the host's, the last two layers a second device's": Where(kv_on_host=True, elsewhere=(2, 3)),
    "keys and values are the host's, two layers by turns a second device's": Where(0, 4, True, elsewhere=(0, 2)),
    "keys and values are the host's, all layers a second device's": Where(0, kv_on_host=True, elsewhere=(0, 1, 2, 3)),
}
FEW_PLACES = [
    "all layers come from disk, through the host",
    "a second device has one between others",
    "keys and values are the host's, the last two layers a second device's",
]


@pytest.fixture(scope="module")
def in_order(tiny: Path) -> torch.Tensor:
    """The bits of a sweep whose copies are made as early as may be."""
    return on_device(tiny, Where(), torch.bfloat16)


@pytest.mark.slow
@pytest.mark.parametrize("name", long_but(FEW_PLACES, PLACES))
def test_results_do_not_depend_on_the_places_of_layers_or_on_the_moment_of_copies(
    name: str, tiny: Path, in_order: torch.Tensor
) -> None:
    """Copies as early as the device may make them, as late, and by chance; races are looked for in all other orders."""
    where = PLACES[name]
    for chance, seed in ((ALWAYS, 0), (NEVER, 0), (0.6, 1)):
        again = replace(where, chance=chance, seed=seed)
        assert torch.equal(on_device(tiny, again, torch.bfloat16), in_order), (chance, seed)


@pytest.mark.slow
@pytest.mark.parametrize("family", long_but(["qwen2 moe, shared expert"], OTHER_MIXTURES))
def test_experts_stream_to_one_device_while_another_holds_whole_layers(family: str, tmp_path: Path) -> None:
    """In the bits of one device that has all layers whole and multiplies with all experts together.

    Experts come as late as possible and at random, wherever KV is.
    """
    folder = save_model(tmp_path / "model", FAMILIES[family], dtype=torch.bfloat16)
    wanted = on_device(folder, Where(max_resident=9), torch.bfloat16)
    for kv_on_host, elsewhere, chance in ((True, (1,), NEVER), (False, (0, 1), 0.6)):
        where = Where(1, 2, kv_on_host, expert_slabs=8, elsewhere=elsewhere, chance=chance)
        assert torch.equal(on_device(folder, where, torch.bfloat16), wanted), where


@pytest.mark.parametrize("method", long_but(["4 bits"], ["4 bits", "8 bits", "float32"]))
def test_experts_that_are_packed_or_must_be_converted_have_the_same_bits_wherever_they_are(
    method: str, tmp_path: Path
) -> None:
    """Multiplied together, one by one when chosen, and one by one from memory as they cannot be used as stored."""
    plain = save_model(tmp_path / "model", of_two_layers("qwen3 moe"), dtype=torch.bfloat16)
    other = save_model(tmp_path / "wide", of_two_layers("qwen3 moe"))
    folder = other if method == "float32" else pack(plain, int(method[0]), tmp_path / "packed")
    wanted = on_device(plain if method == "float32" else folder, Where(9), torch.bfloat16)
    for where in (Where(9), Where(1, expert_slabs=8)):
        assert torch.equal(on_device(folder, where, torch.bfloat16), wanted), where


@pytest.mark.slow
@pytest.mark.parametrize(
    "where",
    [
        Where(kv_on_host=True, chance=NEVER),
        Where(0, 4, kv_on_host=True, elsewhere=(1, 2), chance=0.6),
        Where(elsewhere=(2,), chance=NEVER),
    ],
)
def test_states_stay_with_their_layers_wherever_kv_is(where: Where, tmp_path: Path) -> None:
    """Of these four layers the third alone has keys and values, which come to it from the host; a state never moves."""
    folder = save_model(tmp_path / "model", FAMILIES["qwen3.5, recurrent layers"])
    assert torch.equal(on_device(folder, where, torch.bfloat16), on_device(folder, Where(9), torch.bfloat16))


def test_latents_on_the_host_with_a_matrix_in_4_bits(tmp_path: Path) -> None:
    """A matrix that is used by heads is written out with the layer, others just before their products."""
    source = save_model(tmp_path / "model", FAMILIES["minicpm3, latents and no experts"])
    folder = packed_as("compressed-tensors", source, tmp_path / "packed")
    require_close(on_device(folder, Where(kv_on_host=True), torch.float32), on_cpu(folder, torch.float32))


PACKINGS = [(method, bits) for method in ("compressed-tensors", "gptq", "gptq, unordered") for bits in (4, 8)]


@pytest.mark.slow
@pytest.mark.parametrize(("method", "bits"), [*PACKINGS, ("awq", 4), ("W4A16, asymmetric", 4), ("FP8, blocks", 8)])
def test_packed_layers_give_the_cpus_results(method: str, bits: int, tiny: Path, tmp_path: Path) -> None:
    folder = packed_as(method, tiny, tmp_path / "packed", bits)
    require_close(on_device(folder, Where(), torch.float32), on_cpu(folder, torch.float32))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["compressed-tensors", "awq", "gptq", "gptq, unordered"])
def test_unpacking_kernels_run_in_a_sweep(method: str, tmp_path: Path) -> None:
    """Triton's own, interpreted, which takes long: in one layer and one chunk of rows."""
    one = save_model(tmp_path / "one", LlamaConfig(**{**TINY.to_dict(), "num_hidden_layers": 1}))
    folder = packed_as(method, one, tmp_path / "packed")
    found, wanted = (
        on_device(folder, Where(), torch.float32, unpacking=by, sweeps=one_sweep) for by in (unpack_triton, unpacking)
    )
    assert torch.equal(found, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before their products", "with their layer", "never"])
def test_memory_for_unpacked_matrices_is_as_large_as_needed(
    when: str, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For the largest of them, for a whole layer, or for none if products read packed ones; results are the same."""
    folder, is_late = packed_as("compressed-tensors", tiny, tmp_path / "packed"), when == "before their products"
    with computing_by("triton" if when == "never" else "cublas"):
        wanted = on_device(folder, Where(), torch.bfloat16)
        assert torch.equal(on_device(folder, Where(elsewhere=(1, 3)), torch.bfloat16), wanted), "each on its own device"
        if when == "with their layer":
            monkeypatch.setattr(LayerExtents, "_late", lambda *_: [])
        with pretending(), on_the_device(folder, Where(), torch.bfloat16) as model:
            slots = model.tiers.layers[0].slots
            late, early = (
                [slot.source.scratch_bytes(torch.bfloat16) for slot in slots if can_wait(slot) is waits]
                for waits in (True, False)
            )
            wanted_bytes = 0 if when == "never" else max(late) if is_late else sum(late)
            assert len(model._scratch[device()]._memory) == wanted_bytes + sum(early)
            assert torch.equal(three_sweeps(model, device()).float(), wanted)


def shifted(folder: Path, to: Path, by: int) -> Path:
    """The same model, whose tensors begin `by` bytes behind a multiple of 16 in their files."""
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


@pytest.mark.slow
def test_packed_matrices_that_are_not_aligned_are_written_out(tiny: Path, tmp_path: Path) -> None:
    """A view of them would be a copy of what was in the slab first."""
    packed = packed_as("compressed-tensors", tiny, tmp_path / "packed")
    wanted = on_device(packed, Where(), torch.bfloat16)
    with pretending(), on_the_device(shifted(packed, tmp_path / "by 2", 2), Where(), torch.bfloat16) as model:
        assert torch.equal(three_sweeps(model, device()).float(), wanted)
        assert notes.launches["write"]


def test_matrices_begin_at_multiples_of_16_bytes(tiny: Path, tmp_path: Path) -> None:
    found, places = [], set()
    for by in (0, 8):
        folder = shifted(tiny, tmp_path / f"by {by}", by)
        with pretending(), on_the_device(folder, Where(), torch.float32) as model:
            found.append(three_sweeps(model, device()))
            for index, layer in enumerate(model.skeleton.layers):
                with model.tiers.layer(index) as slab:
                    model._bind(index, slab)
                    places |= {parameter.data_ptr() % 16 for parameter in layer.parameters()}
        assert not notes.order.races
    assert places == {0}
    assert torch.equal(*found)
    require_close(found[0], on_cpu(tiny, torch.float32))


def test_slabs_of_experts_are_aligned_like_whole_layers() -> None:
    """A library that chooses kernels by alignment then gives the same bits for either."""
    host: Any = None
    copies = ExpertCopies(host, {}, {}, 4096, 3, InlineStreams(), CopyStats())
    assert copies._slabs.stride(0) % 512 == 0
