"""What a run that goes on makes sure of: all that decides the draft is as it was."""

from __future__ import annotations

import json
import shutil
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from conftest import TINY, save_model
from safetensors.torch import load_file, save_file
from test_distill import distilled

from bough.distill import run, train
from bough.distill.recipe import Recipe
from bough.distill.rows import Rows
from bough.errors import ConfigError

LAYERS = ("--drop-layers", "2")


@pytest.fixture(scope="module")
def cut_off(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a training run that was interrupted; its text stands beside it."""
    out = tmp_path_factory.mktemp("interrupted") / "draft"
    take_step = train.Trainer._train_step

    def interrupted(self: train.Trainer) -> float:
        if self.step == 2:
            raise KeyboardInterrupt
        return take_step(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train.Trainer, "_train_step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            distilled(tiny, out, *LAYERS, "--check-steps", "1")
    return out


@pytest.fixture
def copied(cut_off: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same for a test of its own, in which no model is loaded."""
    shutil.copytree(f"{cut_off}-text", tmp_path / "draft-text")

    def load(*_: object) -> None:
        raise AssertionError("a model is loaded")

    monkeypatch.setattr(run, "Network", load)
    return Path(shutil.copytree(cut_off, tmp_path / "draft"))


@pytest.mark.parametrize(
    ("flag", "value", "then"),
    [
        ("--dtype", "bfloat16", "float32"),
        ("--text-tokens", "700", "500"),
        ("--text-rows", "5", "4"),
        ("--row-tokens", "64", "48"),
        ("--rank", "5", "4"),
        ("--learning-rate", "0.002", "0.001"),
        ("--batch-rows", "3", "2"),
        ("--tokens", "1920", "960"),
        ("--seed", "1", "0"),
        ("--drop-layers", "1,2", "2"),
    ],
)
def test_other_settings_are_refused_by_name(tiny: Path, copied: Path, flag: str, value: str, then: str) -> None:
    """Once another --dtype or --text-tokens went on unseen, and the card told a command that makes another draft."""
    wanted = (
        rf"^{flag}: {value}; {copied}/training\.safetensors is .* began with {then}; the same {flag}, or another --out"
    )
    with pytest.raises(ConfigError, match=wanted):
        distilled(tiny, copied, *LAYERS, flag, value)


def test_another_target_of_the_same_shapes_is_refused(tiny: Path, copied: Path, tmp_path: Path) -> None:
    other = save_model(tmp_path / "other", TINY, seed=1)
    digest = "fingerprint [0-9a-f]{24}"
    with pytest.raises(ConfigError, match=f"^TARGET: {digest}; .* began with {digest}; the same TARGET, or"):
        distilled(other, copied, *LAYERS, "--data", str(tmp_path / "other-text"))
    assert not (tmp_path / "other-text").exists()


def test_other_text_is_refused(tiny: Path, cut_off: Path, tmp_path: Path) -> None:
    """Of the same kind, in which one token is another. A copy of the very text will do."""
    out = Path(shutil.copytree(cut_off, tmp_path / "draft"))
    text = Path(shutil.copytree(f"{cut_off}-text", tmp_path / "text"))
    file = text / "text-00000.safetensors"
    rows = Rows.load(file)
    rows.tokens[1, 5] += 1
    rows.save(file)
    digest = "fingerprint [0-9a-f]{24}"
    with pytest.raises(ConfigError, match=f"^--data: {digest}; .* began with {digest}; the same --data, or"):
        distilled(tiny, out, *LAYERS, "--data", str(text))
    rows.tokens[1, 5] -= 1
    rows.save(file)
    distilled(tiny, out, *LAYERS, "--data", str(text))


def test_layers_that_were_chosen_are_part_of_it(tiny: Path, cut_off: Path, tmp_path: Path) -> None:
    """Which is known only when they have been chosen again."""
    out = Path(shutil.copytree(cut_off, tmp_path / "draft"))
    with pytest.raises(ConfigError, match=r"^--drop-layers: \d,\d; .* began with 2; "):
        distilled(tiny, out, "--num-layers", "2", "--data", f"{cut_off}-text")


def test_a_checkpoint_that_does_not_say_is_not_gone_on_from(tiny: Path, copied: Path) -> None:
    """As earlier versions wrote them."""
    file = copied / train.CHECKPOINT_NAME
    save_file(load_file(file), file, {"step": "1", "recipe": json.dumps({"rank": 4, "seed": 0})})
    with pytest.raises(ConfigError, match=r"^TARGET: .* began with nothing on record; "):
        distilled(tiny, copied, *LAYERS)


@pytest.mark.parametrize("metadata", [{"step": "1"}, {"step": "1", "recipe": "[1"}, {"step": "1", "recipe": "3"}])
def test_a_damaged_checkpoint_is_refused_by_name(tiny: Path, copied: Path, metadata: dict[str, str]) -> None:
    file = copied / train.CHECKPOINT_NAME
    save_file({"x": torch.zeros(1)}, file, metadata)
    with pytest.raises(ConfigError, match=rf"--out: {file} is damaged: .*; without it the run begins anew"):
        distilled(tiny, copied, *LAYERS)


def test_everything_that_the_card_tells_is_compared() -> None:
    compared = {field.name for field in fields(Recipe)}
    assert {*run.DECIDING} - {"drop_layers"} | {"dropped_layers", "target", "text"} == compared


@pytest.mark.parametrize(("wrong", "more"), [("dtype float32", ("--dtype", "bfloat16")), ("template", ())])
def test_text_that_another_teacher_would_write_is_not_gone_on_with(
    tiny: Path, cut_off: Path, copied: Path, tmp_path: Path, wrong: str, more: tuple[str, ...]
) -> None:
    """Another data type, or another chat template in the target's folder, writes other text; no model is loaded."""
    folder = Path(shutil.copytree(tiny, tmp_path / "model"))
    if not more:
        (folder / "chat_template.jinja").write_text("{{ messages[0].content }}#")
    with pytest.raises(ConfigError, match=rf"--data: {cut_off}-text holds text of {wrong}"):
        distilled(folder, tmp_path / "out", *LAYERS, "--data", f"{cut_off}-text", *more)
