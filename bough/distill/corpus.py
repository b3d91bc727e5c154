"""The text that a teacher has written, in shards on disk: a shard is whole or not there, and has a seed of its own."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tqdm import tqdm

from bough.distill.rows import Rows
from bough.distill.teacher import Network, Template
from bough.distill.text import NUM_TOP, Script, Writer
from bough.errors import ConfigError
from bough.model.files import make_folder, replace

MANIFEST_NAME = "bough_text.json"
HELD_OUT_NAME = "held-out.safetensors"
HELD_OUT_SHARD = 1 << 20  # a number that no shard to train on will have
HELD_OUT_ROWS = 24
SEED_STEP = 1_000_003  # between the seeds of two runs, so that their shards have none in common


@dataclass(frozen=True, slots=True)
class TextSettings:
    """What decides the text; a folder holds text of one kind."""

    base: str  # fingerprint of the teacher
    seed: int = 0
    num_rows: int = 96  # written at once; a shard
    row_tokens: int = 384
    max_answer_tokens: int = 192
    num_top: int = NUM_TOP


class Corpus:
    """A folder of shards."""

    def __init__(self, folder: Path, settings: TextSettings, teacher: Network, template: Template) -> None:
        """
        Raises:
            ConfigError: the folder holds text of another kind, or something else.
        """
        self._folder = folder
        self._settings = settings
        self._teacher = teacher
        self._template = template
        manifest, content = folder / MANIFEST_NAME, asdict(settings)
        if manifest.is_file():
            found = json.loads(manifest.read_text())
            if found != content:
                wrong = next(name for name in content if found.get(name) != content[name])
                raise ConfigError(
                    f"--data: {folder} holds text of {wrong} {found.get(wrong)}, not {content[wrong]}; "
                    "another folder would do"
                )
        elif folder.is_dir() and any(folder.iterdir()):
            raise ConfigError(f"--data: {folder} is not empty, and holds no text of bough's; another folder would do")
        else:
            make_folder("--data", folder)
            replace(manifest, lambda partial: partial.write_text(json.dumps(content, indent=1)))

    def rows(self, num_tokens: int) -> Rows:
        """Text to train on, at least so much; what is not there yet is written."""
        shard_tokens = self._settings.num_rows * self._settings.row_tokens
        count = -(-num_tokens // shard_tokens)
        files = [self._folder / f"text-{number:05d}.safetensors" for number in range(count)]
        there = sum(file.is_file() for file in files)
        with tqdm(total=count * shard_tokens, initial=there * shard_tokens, unit="token", desc="writing") as bar:
            for number, file in enumerate(files):
                if not file.is_file():
                    self._write(file, number, bar.update)
        return Rows.joined([Rows.load(file) for file in files])

    def held_out(self, questions: Sequence[Sequence[int]]) -> Rows:
        """Greedy answers, never trained on: to these questions, or to some that the teacher makes up."""
        file = self._folder / HELD_OUT_NAME
        script = Script(self._template, self._settings.max_answer_tokens, (0.0,))
        seed = self._settings.seed * SEED_STEP + HELD_OUT_SHARD
        with tqdm(unit="token", desc="held-out answers") as bar:
            writer = Writer(self._teacher, script, seed)
            if questions:
                return writer.answer(questions, self._settings.max_answer_tokens, bar.update)
            if not file.is_file():
                writer.write(HELD_OUT_ROWS, self._settings.row_tokens, bar.update).save(file)
        return Rows.load(file)

    def _write(self, file: Path, number: int, on_place: Callable[[int], object]) -> None:
        script = Script(self._template, self._settings.max_answer_tokens)
        writer = Writer(self._teacher, script, self._settings.seed * SEED_STEP + number)
        writer.write(self._settings.num_rows, self._settings.row_tokens, on_place).save(file)
