"""What a run takes of memory: told and refused before anything is loaded, and reckoned from above but not by far."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import save_model
from test_distill import SIZES, distilled
from transformers import AutoConfig

from bough.distill import memory, run
from bough.distill.memory import Size, Work, require_memory
from bough.distill.rows import Placed
from bough.distill.student import correct
from bough.distill.teacher import Network, build_part
from bough.errors import ConfigError
from bough.model.checkpoint import Checkpoint
from bough.model.experts import ExpertTable

CPU, GPU = torch.device("cpu"), torch.device("cuda:0")
WORK = Work(
    kept=(0, 1, 3),
    num_kept=3,
    rank=4,
    opening_tokens=6,
    written=(Size(24, 54), Size(4, 54)),
    trained=Size(2, 54),
    judged=Size(1, 54),
    text_tokens=500,
)
NUMBERS = r"[\d.]+ [MG]B"


def have(monkeypatch: pytest.MonkeyPatch, device_bytes: int, host_bytes: int = 10**12) -> None:
    """So much memory is free."""
    monkeypatch.setattr(memory, "free_device_bytes", lambda _: device_bytes)
    monkeypatch.setattr(memory, "free_memory", lambda: host_bytes)


def test_too_little_memory_is_said_before_anything_is_loaded(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once the kernel ended the run, and said nothing."""
    have(monkeypatch, 100_000)

    def load(*_: object) -> None:
        raise AssertionError("a model is loaded")

    monkeypatch.setattr(run, "Network", load)
    wanted = (
        rf"^TARGET: the teacher takes {NUMBERS} \({NUMBERS} weights, {NUMBERS} .*\), .*; of cpu's memory 0.10 MB are "
        rf"free; a machine or a --device with {NUMBERS} would do$"
    )
    with pytest.raises(ConfigError, match=wanted):
        distilled(tiny, tmp_path / "out", "--drop-layers", "2")
    assert not (tmp_path / "out").exists()


def test_what_a_run_takes_is_told(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    have(monkeypatch, 5 * 10**9)
    distilled(tiny, tmp_path / "out", "--drop-layers", "2", "--tokens", "96")
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("memory: ")]
    assert len(lines) == 1
    for part in (
        "the teacher takes",
        "the student takes",
        "corrections with gradients",
        "cpu's memory 5.00 GB are free",
    ):
        assert part in lines[0]


def test_what_would_do_is_named(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Smaller batches, where these are what does not fit; a longer text only where the host is another's."""
    skeleton = build_part(Checkpoint.open(tiny), (), "float32")
    many = replace(WORK, written=(Size(4000, 54),))
    have(monkeypatch, 10_000_000)
    with pytest.raises(ConfigError, match=r"TARGET: the teacher .* would do, or fewer --text-rows or --row-tokens$"):
        require_memory(skeleton, many, GPU, print)
    large = replace(WORK, trained=Size(900, 54))
    with pytest.raises(ConfigError, match=r"TARGET: the student .* would do, or a smaller --batch-rows, --row-tokens"):
        require_memory(skeleton, large, GPU, print)
    have(monkeypatch, 10**9, host_bytes=10**6)
    with pytest.raises(ConfigError, match=r"--text-tokens: 9000 .* of the host's memory, of which 1.00 MB are free"):
        require_memory(skeleton, replace(WORK, text_tokens=9000), GPU, print)
    require_memory(skeleton, replace(WORK, text_tokens=500), CPU, print)


def test_text_that_is_there_needs_no_room_to_be_written(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was written elsewhere may be too much to write here."""
    asked: list[Work] = []
    monkeypatch.setattr(run, "require_memory", lambda _skeleton, work, *_: asked.append(work))
    for out in ("one", "two"):
        distilled(tiny, tmp_path / out, "--drop-layers", "2", "--data", str(tmp_path / "text"), "--tokens", "96")
    assert [len(work.written) for work in asked] == [2, 1]


def test_layers_still_to_be_chosen_are_taken_for_those_that_cost_most(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    skeleton = build_part(Checkpoint.open(tiny), (), "float32")
    chosen = memory._student(skeleton, WORK, memory._heaviest(skeleton, 3)).total
    every = [tuple(i for i in range(4) if i != dropped) for dropped in range(4)]
    assert chosen == max(memory._student(skeleton, WORK, kept).total for kept in every)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model_type", ["llama", "qwen3", "olmo2", "cohere", "gemma", "gemma2", "mixtral", "gpt_oss"])
def test_what_is_reckoned_is_what_is_taken(model_type: str, dtype: str, tmp_path: Path) -> None:
    """Weights and corrections to the number; what the gradient needs from above, at most twice as much."""
    config = AutoConfig.for_model(
        model_type,
        **{**SIZES, "num_hidden_layers": 4},
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32 if model_type == "qwen3" else 16,  # whose heads have norms of their own, and are wide
        pad_token_id=0,
        **({"num_local_experts": 4} if model_type in ("mixtral", "gpt_oss") else {}),
    )
    checkpoint = Checkpoint.open(save_model(tmp_path / "target", config))
    reckoned = memory._student(build_part(checkpoint, (), dtype), WORK, WORK.kept)
    student = Network(checkpoint, (2,), dtype, CPU)
    storages = [matrix.untyped_storage() for matrix in matrices(student.skeleton.model)]
    weights = {storage.data_ptr(): storage.nbytes() for storage in storages}
    trained = correct(student, WORK.rank, seed=0)
    assert reckoned.weights == sum(weights.values())
    count = sum(parameter.numel() for parameter in trained.values())
    assert reckoned.trained == count * (memory.TRAINED_COPIES * 4 + student.skeleton.dtype.itemsize)
    model = student.skeleton.model
    known = weights.keys() | {v.untyped_storage().data_ptr() for v in (*model.parameters(), *model.buffers())}
    saved = _saved_bytes(student, WORK.trained, known)
    logits = memory._logit_bytes(student.skeleton, memory.CHUNK)
    assert saved <= reckoned.passing - logits <= 2 * saved


def matrices(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """All weights, those of experts one by one."""
    yield from model.parameters()
    for module in model.modules():
        for table in vars(module).values():
            if isinstance(table, ExpertTable):
                yield from itertools.chain.from_iterable(table._made or ())


def _saved_bytes(student: Network, size: Size, known: set[int]) -> int:
    """Of all that a step keeps for the gradient, but weights."""
    saved: dict[int, tuple[torch.Tensor, int]] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            saved[storage.data_ptr()] = (tensor, storage.nbytes())  # the tensor keeps its place from being reused
        return tensor

    positions = torch.arange(size.num_places).expand(size.num_rows, size.num_places)
    mask = torch.ones(size.num_rows, 1, size.num_places, size.num_places).tril().bool()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        hidden = student.hidden(Placed(positions + 20, positions, mask)).flatten(0, 1)
        ids = torch.zeros(len(hidden), 4, dtype=torch.long)
        student.loss(hidden, ids, torch.full(ids.shape, -2.0))
    return sum(num_bytes for _, num_bytes in saved.values())
