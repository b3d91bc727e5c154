"""`bough pack --draft`: what it writes gives what the written-out weights give, and shares what it says it shares."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from bough.cli.main import main
from bough.config.cache_paths import EXPANSION_NAME
from bough.config.processes import DraftConfig, parse
from bough.errors import CheckpointError, ConfigError
from bough.model.batch.batch import Batch, Segment
from bough.model.checkpoint import shared_weights
from bough.model.checkpoint.checkpoint import INDEX_NAME, Checkpoint
from bough.model.checkpoint.pack_manifest import MANIFEST_NAME
from bough.model.checkpoint.tensor_source import FreshMemory
from bough.model.kv.session_kv import KVSlot
from bough.model.loading.layer_selection import working_layers
from bough.model.loading.loading import build_skeleton, read_place
from bough.model.packing import shard_writer
from bough.model.packing.pack_draft import pack_draft
from bough.model.running.runner import ResidentModel
from bough.model.sizes.model_sizes import find_config, model_shapes
from bough.trees.tree import Tree
from draft_worker.model.sources import load_draft
from draft_worker.worker import DraftWorker
from tests.fakes.draft import grow_call

CPU = torch.device("cpu")
TOKENS = [5, 6, 7, 200, 31]
SHARED = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}


@pytest.fixture(scope="module")
def target(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy that tests may look at and that no other test changes."""
    return shutil.copytree(tiny, tmp_path_factory.mktemp("draft") / "target")


@pytest.fixture(scope="module")
def draft(target: Path) -> Path:
    """Of three of the four layers, in several shards."""
    folder = target.parent / "draft"
    written = pack_draft(str(target), (1,), 6.0, folder, shard_bytes=100_000)
    assert 5.0 < written.bits_per_weight <= 6.0
    assert {layout.bits for layout in written.layouts.values()} == {4, 8}
    assert written.num_bytes == sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    return folder


def logits(model: ResidentModel) -> torch.Tensor:
    """(num_tokens, vocab_size) of a few tokens in a row."""
    slot = KVSlot(model.skeleton.kv_shape(), len(TOKENS), CPU)
    chain = Tree.of(TOKENS, list(range(-1, len(TOKENS) - 1)), [0.0] * len(TOKENS))
    return model.logits(Batch([Segment.tree(slot, 0, chain)], None, CPU)).clone()


def test_it_is_bitwise_the_target_with_these_weights(target: Path, draft: Path) -> None:
    """Which are close to its own."""
    packed, plain = (build_skeleton(Checkpoint.open(folder), torch.float32, (0, 2, 3)) for folder in (draft, target))
    values = {}
    for slots, names in zip(packed.layer_slots, plain.layer_slots, strict=True):
        for slot, original in zip(slots, names, strict=True):
            raw = [read_place(place) for place in slot.source.places]
            (name,) = (place.name for place in original.source.places)
            values[name] = slot.source.value(raw, torch.float32, FreshMemory(CPU))
            own = original.source.value([read_place(original.source.places[0])], torch.float32, FreshMemory(CPU))
            assert (values[name] - own).square().sum() < 0.01 * own.square().sum()
    written = shutil.copytree(target, draft.parent / "written")
    for file in written.glob("*.safetensors"):
        tensors = {name: values.get(name, tensor) for name, tensor in load_file(file).items()}
        shard_writer.save_file(tensors, file, metadata={"format": "pt"})
    mine = logits(load_draft(Checkpoint.open(draft), (), "float32", CPU))
    assert torch.equal(mine, logits(load_draft(Checkpoint.open(written), (1,), "float32", CPU)))


def test_nothing_is_stored_twice(target: Path, draft: Path) -> None:
    stored = {name for file in draft.glob("*.safetensors") for name in load_file(file)}
    assert not any(name.startswith("model.layers.1.") for name in stored)
    assert all(name.startswith("model.layers.") for name in stored)
    checkpoint = Checkpoint.open(draft)
    borrowed = {name for name, place in checkpoint.tensors.items() if place.file.parent == target}
    assert borrowed == SHARED & set(Checkpoint.open(target).tensors)
    assert checkpoint.kept_layers == (0, 2, 3)


def test_a_whole_draft_needs_no_target(target: Path, draft: Path, tmp_path: Path) -> None:
    gone = shutil.copytree(target, tmp_path / "target")
    pack_draft(str(gone), (1,), 6.0, tmp_path / "draft", is_whole=True)
    shutil.rmtree(gone)
    whole = Checkpoint.open(tmp_path / "draft")
    assert all(place.file.parent == tmp_path / "draft" for place in whole.tensors.values())
    shared = Checkpoint.open(draft)
    assert set(whole.tensors) == set(shared.tensors)
    assert torch.equal(*(logits(load_draft(checkpoint, (), "float32", CPU)) for checkpoint in (whole, shared)))


def test_a_draft_worker_runs_it(draft: Path) -> None:
    config = parse(DraftConfig, "d", ["--model", str(draft), "--dtype", "float32", "--threads", "1"], {})
    worker = DraftWorker(config, "test")
    try:
        assert "3 layers" in worker.info().model_description
        assert "mixed bits (bough)" in worker.info().model_description
        assert len(worker.grow(grow_call([1, 2, 3])).result().tree) > 1
    finally:
        worker.close()


def test_layers_are_counted_without_identity_copies(target: Path, tmp_path: Path) -> None:
    expanded = shutil.copytree(target, tmp_path / "expanded")
    (expanded / EXPANSION_NAME).write_text(json.dumps({"working_layers": [0, 2, 3]}))
    pack_draft(str(expanded), (1,), 6.0, tmp_path / "draft")
    checkpoint = Checkpoint.open(tmp_path / "draft")
    assert working_layers(checkpoint) == (0, 3)
    assert not (tmp_path / "draft" / EXPANSION_NAME).exists()
    with pytest.raises(ConfigError, match="--drop-layers: must be 0 to 1 for draft, got 2"):
        load_draft(checkpoint, (2,), "float32", CPU)


def test_it_goes_on_where_it_was_interrupted(
    target: Path, draft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken, real, calls = tmp_path / "broken", shard_writer.save_file, []

    def fails(tensors: dict[str, torch.Tensor], file: Path, metadata: dict[str, str]) -> None:
        calls.append(file)
        if len(calls) == 2:
            file.write_bytes(b"half")
            raise OSError(28, "No space left on device")
        real(tensors, file, metadata=metadata)

    monkeypatch.setattr(shard_writer, "save_file", fails)
    with pytest.raises(ConfigError, match=r"draft-00001.*the disk is full; make room and run the same command again"):
        pack_draft(str(target), (1,), 6.0, broken, shard_bytes=100_000)
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        Checkpoint.open(broken)
    pack_draft(str(target), (1,), 6.0, broken, shard_bytes=100_000)
    assert len(calls) == len(list(draft.glob("*.safetensors"))) + 1, "whole shards are not written again"
    assert {f.name: f.read_bytes() for f in broken.iterdir()} == {f.name: f.read_bytes() for f in draft.iterdir()}


def test_a_target_that_has_changed_is_refused_with_both_fingerprints(target: Path, tmp_path: Path) -> None:
    changing = shutil.copytree(target, tmp_path / "target")
    pack_draft(str(changing), (), 6.0, tmp_path / "draft")
    before = Checkpoint.open(changing).fingerprint()
    place = Checkpoint.open(changing).tensors["model.embed_tokens.weight"]
    with place.file.open("r+b") as file:
        file.seek(place.offset + 5)
        file.write(b"\x7f")
    after = Checkpoint.open(changing).fingerprint()
    with pytest.raises(CheckpointError, match=rf"must have the fingerprint {before}, got {after}; .*pack --draft"):
        Checkpoint.open(tmp_path / "draft")
    shutil.rmtree(changing)
    with pytest.raises(
        CheckpointError,
        match=r"shares tensors with .*target, which is gone .*must be a folder or a GGUF file",
    ):
        Checkpoint.open(tmp_path / "draft")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda _: "{", "is damaged"),
        (lambda content: json.dumps({**content, "format": 9}), "format must be 2, got 9"),
        (lambda content: json.dumps({**content, "colour": "blue"}), "is damaged: .*colour"),
        (lambda content: json.dumps({k: v for k, v in content.items() if k != "borrowed"}), "is damaged: .*borrowed"),
    ],
)
def test_a_damaged_manifest_is_named(
    draft: Path, tmp_path: Path, change: Callable[[dict[str, object]], str], message: str
) -> None:
    folder = shutil.copytree(draft, tmp_path / "damaged")
    manifest = folder / shared_weights.NAME
    manifest.write_text(change(json.loads(manifest.read_text())))
    with pytest.raises(CheckpointError, match=rf"{shared_weights.NAME}: {message}"):
        Checkpoint.open(folder)


def test_it_is_refused_where_it_makes_no_sense(target: Path, draft: Path, tmp_path: Path) -> None:
    for drops, bits, folder, message in (
        ((4,), 6.0, "new", "--drop-layers: must be 0 to 3 for target, got 4"),
        ((0, 1, 2, 3), 6.0, "new", "--drop-layers: must leave a layer of target, got all 4"),
        ((), 4.3, "few", r"--bits: must be 4\.\d+ to [78]\.\d+ per weight, scales included, got 4\.3"),
        ((2,), math.nan, "none", r"--bits: must be 4\.\d+ to .*, got nan"),
        ((2,), 6.0, "../draft", "with another packed model"),
    ):
        with pytest.raises(ConfigError, match=message):
            pack_draft(str(target), drops, bits, draft.parent / "draft" if ".." in folder else tmp_path / folder)
    with pytest.raises(ConfigError, match="is packed already"):
        pack_draft(str(draft), (), 6.0, tmp_path / "twice")
    with pytest.raises(CheckpointError, match="must not be a draft of mixed bits"):
        model_shapes(*find_config(str(draft)), "bfloat16", 0, 64)


def test_the_command_writes_a_checkpoint_that_knows_its_layers(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "draft"
    command = ["pack", str(target), "--draft", "--drop-layers", "1-2", "--bits", "6", "--out", str(out)]
    with pytest.raises(SystemExit, match="0"):
        main(command)
    assert "bits a weight" in capsys.readouterr().err
    assert {f.name for f in out.iterdir()} >= {
        "config.json",
        "tokenizer.json",
        INDEX_NAME,
        MANIFEST_NAME,
        shared_weights.NAME,
    }
    assert Checkpoint.open(out).kept_layers == (0, 3)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--bits", "5"], "error: --bits: must be 4 or 8, or given with --draft for mixed bits, got 5"),
        (["--drop-layers", "3"], "error: --drop-layers: must be given with --draft only, got [3]"),
        (["--drop-layers", ""], "error: --drop-layers: must be given with --draft only, got []"),
        (["--whole"], "error: --whole: must be given with --draft only"),
        (["--draft", "--drop-layers", "x"], "error: --drop-layers: must be layers such as 12-15,20, got 'x'"),
    ],
)
def test_flags_that_do_not_fit(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["pack", "nowhere", *flags])
    assert capsys.readouterr().err.startswith(message)
