"""The text that a teacher has written, in shards on disk: a shard is whole or not there, and has a seed of its own."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from bough.distill.rows import Rows
from bough.distill.teacher import Network, Template
from bough.distill.text import ANSWER_TEMPERATURES, MAX_QUESTION_TOKENS, NUM_TOP, QUESTION_SHARE, Script, Writer
from bough.errors import ConfigError
from bough.model.files import is_taken, make_folder, replace

MANIFEST_NAME = "bough_text.json"
FORMAT = 2  # of the first, answers may be cut off where a question would end
HELD_OUT_NAME = "held-out.safetensors"
HELD_OUT_SHARD = 1 << 20  # a number that no shard to train on will have
HELD_OUT_ROWS = 24
SEED_STEP = 1_000_003  # between the seeds of two runs, so that their shards have none in common


@dataclass(frozen=True, slots=True)
class TextSettings:
    """What decides the text; a folder holds text of one kind."""

    base: str  # fingerprint of the teacher
    template: str  # fingerprint of its chat template
    dtype: str  # that the teacher computes in
    seed: int
    num_rows: int  # written at once; a shard
    row_tokens: int
    num_top: int = NUM_TOP

    @property
    def max_question_tokens(self) -> int:
        """Of a question that the teacher makes up."""
        return min(MAX_QUESTION_TOKENS, self.row_tokens // QUESTION_SHARE)

    @property
    def max_answer_tokens(self) -> int:
        """Of an answer."""
        return self.row_tokens // 2

    def shards(self, folder: Path, num_tokens: int) -> list[Path]:
        """The files of text to train on, at least so much of it."""
        count = -(-num_tokens // (self.num_rows * self.row_tokens))
        return [folder / f"text-{number:05d}.safetensors" for number in range(count)]

    def content(self) -> dict[str, int | str]:
        """Of the folder's manifest."""
        return {"format": FORMAT, **asdict(self)}

    def require_kind(self, folder: Path) -> None:
        """Makes sure that a folder holds such text, or nothing yet.

        Raises:
            ConfigError: it holds text of another kind, or something else.
        """
        manifest, content = folder / MANIFEST_NAME, self.content()
        if manifest.is_file():
            found = _read(manifest)
            wrong = next((name for name in content if found.get(name) != content[name]), None)
            if wrong is not None:
                raise ConfigError(
                    f"--data: {folder} holds text of {wrong} {found.get(wrong)}, not {content[wrong]}; "
                    "another folder would do"
                )
        elif is_taken(folder):
            raise ConfigError(f"--data: {folder} is not empty, and holds no text of bough's; another folder would do")

    def script(self, template: Template, answer_temperatures: tuple[float, ...] = ANSWER_TEMPERATURES) -> Script:
        """How the teacher writes it."""
        return Script(template, self.max_answer_tokens, self.max_question_tokens, answer_temperatures)


def _read(manifest: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(manifest.read_text()))
    except (OSError, ValueError, TypeError) as exc:
        raise ConfigError(f"--data: {manifest} is damaged: {exc}; another folder would do") from exc


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
        settings.require_kind(folder)
        manifest = folder / MANIFEST_NAME
        if not manifest.is_file():
            make_folder("--data", folder)
            replace(manifest, lambda partial: partial.write_text(json.dumps(settings.content(), indent=1)))

    def rows(self, num_tokens: int) -> Rows:
        """Text to train on, at least so much; what is not there yet is written."""
        shard_tokens = self._settings.num_rows * self._settings.row_tokens
        files = self._settings.shards(self._folder, num_tokens)
        there = sum(file.is_file() for file in files)
        with tqdm(total=len(files) * shard_tokens, initial=there * shard_tokens, unit="token", desc="writing") as bar:
            for number, file in enumerate(files):
                if not file.is_file():
                    self._write(file, number, bar.update)
        return Rows.joined([Rows.load(file) for file in files])

    def held_out(self, questions: Sequence[Sequence[int]]) -> Rows:
        """Greedy answers, never trained on: to these questions, or to some that the teacher makes up."""
        file = self._folder / HELD_OUT_NAME
        script = self._settings.script(self._template, (0.0,))
        seed = self._settings.seed * SEED_STEP + HELD_OUT_SHARD
        with tqdm(unit="token", desc="held-out answers") as bar:
            writer = Writer(self._teacher, script, seed)
            if questions:
                return writer.answer(questions, self._settings.max_answer_tokens, bar.update)
            if not file.is_file():
                writer.write(HELD_OUT_ROWS, self._settings.row_tokens, bar.update).save(file)
        return Rows.load(file)

    def _write(self, file: Path, number: int, on_place: Callable[[int], object]) -> None:
        script = self._settings.script(self._template)
        writer = Writer(self._teacher, script, self._settings.seed * SEED_STEP + number)
        writer.write(self._settings.num_rows, self._settings.row_tokens, on_place).save(file)
