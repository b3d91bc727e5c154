"""A whole run: the target writes, layers to leave out are chosen, the student learns, the adapter is written."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from tqdm import tqdm

from bough.config import DistillConfig
from bough.distill.adapter import MANIFEST_NAME, Adapter, Manifest, base_fingerprint
from bough.distill.choose import CHOOSING_ROWS, choose_layers
from bough.distill.corpus import HELD_OUT_ROWS, Corpus, TextSettings
from bough.distill.evaluate import agreement
from bough.distill.memory import Size, Work, require_memory
from bough.distill.recipe import Recipe
from bough.distill.rows import Rows
from bough.distill.teacher import Network, Template, build_part, kept_beside, template_fingerprint
from bough.distill.text import QUESTION_SHARE
from bough.distill.train import CHECKPOINT_NAME, Trainer
from bough.errors import ConfigError, InvalidRequest
from bough.model.checkpoint import Checkpoint
from bough.model.device import choose_device, choose_dtype
from bough.model.files import make_folder
from bough.model.layers import working_layers
from bough.model.threads import compute_with
from bough.model.tokenizer_files import load_tokenizer_files
from bough.tokenizer import Tokenizer

DECIDING = (
    "drop_layers", "rank", "tokens", "text_tokens", "text_rows", "row_tokens", "batch_rows", "learning_rate", "seed",
    "dtype",
)  # fmt: skip


class Target(NamedTuple):
    """What is to have a draft."""

    checkpoint: Checkpoint
    fingerprint: str
    num_layers: int  # without identity copies
    tokenizer: Tokenizer
    template: Template
    device: torch.device

    @property
    def opening(self) -> torch.Tensor:
        return torch.tensor(self.template.opening, device=self.device)


class Lessons(NamedTuple):
    """What the teacher leaves behind."""

    rows: Rows
    held_out: Rows
    dropped_layers: tuple[int, ...]


def make_adapter(config: DistillConfig) -> Adapter:
    """The whole run, from the target's weights to the folder of its draft.

    What can be refused is refused before anything is loaded, not after the hour that the text takes.

    Raises:
        ConfigError: a setting does not fit the target, a folder holds something else, or memory is too small.
    """
    compute_with(config.threads)
    checkpoint = Checkpoint.open(config.target)
    num_layers = len(working_layers(checkpoint))
    _require_layers(config, num_layers)
    tokenizer = Tokenizer(load_tokenizer_files(checkpoint.folder))
    template = _template(config, tokenizer)
    device = choose_device(config.device)
    config = replace(config, dtype=choose_dtype(config.dtype, device))
    target = Target(checkpoint, base_fingerprint(checkpoint), num_layers, tokenizer, template, device)
    if made := _made_before(config, target):
        return made
    recipe = _recipe(config, target)
    recipe.require_same(Path(config.out) / CHECKPOINT_NAME)
    folder, settings = _text(config, target)
    settings.require_kind(folder)
    questions = _questions(config.held_out, target)
    work = _work(config, target, questions)
    require_memory(build_part(checkpoint, (), config.dtype), work, device, tqdm.write)
    make_folder("--out", Path(config.out))
    return _train(config, target, recipe, _teach(config, target, questions))


def _template(config: DistillConfig, tokenizer: Tokenizer) -> Template:
    """How the target's conversations are spelled.

    Raises:
        ConfigError: it has no chat template that is of use, or its turns leave no room in a row.
    """
    if not tokenizer.files.chat_template:
        raise ConfigError(
            f"TARGET: {config.target} has no chat template, in which it is to write questions and answers; a model "
            "that was tuned for conversations, or a `chat_template` in its tokenizer_config.json, would do"
        )
    try:
        template = Template.of(tokenizer)
    except InvalidRequest as exc:
        raise ConfigError(
            f"TARGET: the chat template of {config.target} is of no use ({exc}); a `chat_template` in its "
            "tokenizer_config.json that spells a question and opens the answer would do"
        ) from exc
    least = config.row_tokens // QUESTION_SHARE + len(template.handover)
    if least >= config.row_tokens:
        raise ConfigError(
            f"--row-tokens: {config.row_tokens} leave no room for an answer behind the {len(template.handover)} tokens "
            f"that hand over to it; {2 * len(template.handover)} or more would do"
        )
    return template


def _recipe(config: DistillConfig, target: Target) -> Recipe:
    """What is known of it before there is text."""
    return Recipe(
        target=target.fingerprint,
        dtype=config.dtype,
        text_tokens=config.text_tokens,
        text_rows=config.text_rows,
        row_tokens=config.row_tokens,
        rank=config.rank,
        learning_rate=config.learning_rate,
        batch_rows=config.batch_rows,
        tokens=config.tokens,
        seed=config.seed,
        dropped_layers=tuple(sorted(set(config.drop_layers))) or None,
    )


def _text(config: DistillConfig, target: Target) -> tuple[Path, TextSettings]:
    """Where the text stands, and what it is."""
    settings = TextSettings(
        base=target.fingerprint,
        template=template_fingerprint(target.tokenizer.files),
        dtype=config.dtype,
        seed=config.seed,
        num_rows=config.text_rows,
        row_tokens=config.row_tokens,
    )
    return Path(config.data or f"{Path(config.out)}-text"), settings


def _num_kept(config: DistillConfig, target: Target) -> int:
    """Of the layers, where they are to be chosen."""
    return config.num_layers or max(1, target.num_layers * 4 // 5)


def _work(config: DistillConfig, target: Target, questions: Sequence[Sequence[int]]) -> Work:
    """What is to be done, as memory sees it."""
    folder, settings = _text(config, target)
    opening = len(target.template.opening)
    held_out = Size(HELD_OUT_ROWS, opening + config.row_tokens)
    if questions:
        held_out = Size(len(questions), opening + max(map(len, questions)) + settings.max_answer_tokens)
    is_written = all(file.is_file() for file in settings.shards(folder, config.text_tokens))
    row = opening + config.row_tokens
    return Work(
        kept=kept_beside(config.drop_layers, target.num_layers) if config.drop_layers else None,
        num_kept=_num_kept(config, target),
        rank=config.rank,
        opening_tokens=opening,
        written=(held_out,) if is_written else (held_out, Size(config.text_rows, row)),
        trained=Size(config.batch_rows, row),
        judged=held_out,
        text_tokens=config.text_tokens,
    )


def _made_before(config: DistillConfig, target: Target) -> Adapter | None:
    """The draft that this very command has finished; None where the folder is free for it, or it is under way.

    Raises:
        ConfigError: the folder holds something else, which would be written over.
    """
    out = Path(config.out)
    held = sorted(file.name for file in out.iterdir()) if out.is_dir() else []
    if MANIFEST_NAME in held:
        made = Adapter.open(out)
        dropped = tuple(sorted(set(config.drop_layers))) or made.manifest.dropped_layers
        is_size = config.drop_layers or len(made.kept_layers()) == _num_kept(config, target)
        if is_size and (made.manifest.base, made.manifest.command) == (target.fingerprint, command_of(config, dropped)):
            tqdm.write(f"{out} holds this draft already")
            return made
        raise ConfigError(f"--out: {out} holds a draft, made by {made.manifest.command!r}; another folder would do")
    if held and not any(name.startswith(CHECKPOINT_NAME) for name in held):
        raise ConfigError(f"--out: {out} holds {held[0]}; a folder that is empty, or not there yet, would do")
    return None


def _require_layers(config: DistillConfig, num_layers: int) -> None:
    if num_layers == 1:
        raise ConfigError(f"TARGET: {config.target} has one layer; a draft leaves out at least one and keeps one")
    wrong = [layer for layer in config.drop_layers if layer >= num_layers]
    if wrong:
        raise ConfigError(f"--drop-layers: {wrong[0]}; {config.target} has layers 0 to {num_layers - 1}")
    if len(set(config.drop_layers)) >= num_layers:
        raise ConfigError(f"--drop-layers: all {num_layers}; a draft keeps at least one")
    if config.num_layers >= num_layers:
        raise ConfigError(f"--num-layers: {config.num_layers} of {num_layers}; a draft leaves out at least one")


def _teach(config: DistillConfig, target: Target, questions: Sequence[Sequence[int]]) -> Lessons:
    """Everything for which the whole target is needed; its memory is free again afterwards."""
    teacher = Network(target.checkpoint, (), config.dtype, target.device)
    folder, settings = _text(config, target)
    corpus = Corpus(folder, settings, teacher, target.template)
    held_out = corpus.held_out(questions)
    rows = corpus.rows(config.text_tokens)
    dropped = config.drop_layers
    if not dropped:
        some = rows.take(torch.arange(min(CHOOSING_ROWS, len(rows.tokens))))
        dropped = choose_layers(teacher, _num_kept(config, target), some, target.opening, folder, tqdm.write)
    return Lessons(rows, held_out, tuple(sorted(set(dropped))))


def _train(config: DistillConfig, target: Target, recipe: Recipe, lessons: Lessons) -> Adapter:
    student = Network(target.checkpoint, lessons.dropped_layers, config.dtype, target.device)
    untrained = agreement(student, lessons.held_out, target.opening)
    recipe = replace(recipe, dropped_layers=lessons.dropped_layers, text=lessons.rows.fingerprint())
    trainer = Trainer(student, target.opening, lessons.rows, recipe)
    out = Path(config.out)
    result = trainer.run(lessons.held_out, config.check_steps, out, tqdm.write)
    manifest = Manifest(
        base=target.fingerprint,
        base_name=target.checkpoint.folder.name,
        num_layers=target.num_layers,
        dropped_layers=lessons.dropped_layers,
        rank=config.rank,
        command=command_of(config, lessons.dropped_layers),
        seed=config.seed,
        written_tokens=lessons.rows.num_tokens,
        trained_tokens=trainer.trained_tokens,
        held_out=_held_out_words(config, lessons.held_out),
        top1=round(result.top1, 4),
        top4=round(result.top4, 4),
        untrained_top1=round(untrained.top1, 4),
        untrained_top4=round(untrained.top4, 4),
    )
    adapter = Adapter(manifest, trainer.tensors())
    adapter.save(out)
    (out / CHECKPOINT_NAME).unlink()
    return adapter


def _questions(file: str, target: Target) -> list[list[int]]:
    """Tokens of each question in a JSONL file, behind the opening."""
    if not file:
        return []
    try:
        lines = Path(file).read_text().splitlines()
        entries = [json.loads(line) for line in lines if line.strip()]
        texts = [str(entry["text"] if "text" in entry else entry["turns"][0]) for entry in entries]
    except (OSError, ValueError, KeyError, TypeError, IndexError) as exc:
        raise ConfigError(f"--held-out: {file}: {exc!r}; JSON lines with `text` or `turns` would do") from exc
    if not texts:
        raise ConfigError(f"--held-out: {file} has no questions")
    return [target.tokenizer.encode_chat([("user", text)])[len(target.template.opening) :] for text in texts]


def _held_out_words(config: DistillConfig, held_out: Rows) -> str:
    whose = f"questions of {Path(config.held_out).name}" if config.held_out else "questions that it made up"
    return f"{int(held_out.is_answer.sum())} tokens of its greedy answers to {whose}, never trained on"


def command_of(config: DistillConfig, dropped_layers: tuple[int, ...]) -> str:
    """The command that makes the draft and its card again: every setting that decides them, without folders."""
    settings = {name: getattr(config, name) for name in DECIDING} | {"drop_layers": ",".join(map(str, dropped_layers))}
    if config.held_out:
        settings["held_out"] = Path(config.held_out).name
    flags = [f"--{name.replace('_', '-')} {shlex.quote(str(value))}" for name, value in settings.items()]
    return f"bough distill {Path(config.target).name} --out DIR {' '.join(flags)}"
