"""What a run takes of memory, from shapes alone, and whether there is so much: asked before anything is loaded.

The teacher and the student are never there together, so the larger of the two decides. Knows no files.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from bough.distill.choose import CHOOSING_ROWS
from bough.distill.evaluate import BATCH_ROWS
from bough.distill.loss import CHUNK, logit_cap
from bough.distill.student import is_linear, num_trained, num_untouched, trainable
from bough.distill.text import NUM_TOP
from bough.errors import ConfigError
from bough.model.experts import has_own_products
from bough.model.loading import Skeleton
from bough.model.memory import FLOAT32_BYTES, free_device_bytes, resident_bytes
from bough.placement import gigabytes
from bough.runtime.machine import free_memory

ROW_BYTES = 4 + 4 + 1 + NUM_TOP * (4 + 2)  # of a place in `bough.distill.rows.Rows`
TRAINED_COPIES = 5  # float32: value, gradient, AdamW's two moments, and what a step makes of them for a moment
SAVED_COPIES = 3  # float32: value and moments, as a checkpoint is written
PASSED_COPIES = 1.5  # of what goes into and comes out of a layer's products: attention keeps some of it again
EXPERT_COPIES = 2  # of what goes into and comes out of an expert's: some bound it on both sides, and keep that again
CAPPED_COPIES = 2  # more of logits, where they are capped: as they were before, and how steep that is
SCORE_COPIES = 3  # float32: of attention's scores, where it is our own
CHOSEN_NAMES = "num_experts_per_tok", "moe_topk", "top_k_experts"  # in configurations
STACKED = 3  # axes of a parameter that has a matrix for each expert
JUDGED_COPIES = 2  # float32: logits, and their exponentials


class Size(NamedTuple):
    """A batch of rows."""

    num_rows: int
    num_places: int  # of a row, with the opening

    @property
    def tokens(self) -> int:
        return self.num_rows * self.num_places


@dataclass(frozen=True, slots=True)
class Work:
    """What a run does with its models."""

    kept: tuple[int, ...] | None  # layers of the student; None where they are still to be chosen
    num_kept: int  # so many, then
    rank: int
    opening_tokens: int
    written: tuple[Size, ...]  # batches that the teacher writes
    trained: Size  # batch of a step
    judged: Size  # held-out answers
    text_tokens: int


class Phase(NamedTuple):
    """What one of the two models takes where it computes, in bytes."""

    name: str
    weights: int
    trained: int  # corrections, their gradients and the optimizer
    passing: int  # keys and values, activations and logits
    remedy: str  # for what is not weights

    @property
    def total(self) -> int:
        return self.weights + self.trained + self.passing

    def __str__(self) -> str:
        trained = f", {gigabytes(self.trained)} corrections with gradients and optimizer" if self.trained else ""
        return (
            f"the {self.name} takes {gigabytes(self.total)} ({gigabytes(self.weights)} weights{trained}, "
            f"{gigabytes(self.passing)} for what passes through)"
        )


def require_memory(skeleton: Skeleton, work: Work, device: torch.device, report: Callable[[str], None]) -> None:
    """Makes sure that a run finds room; `skeleton` is the whole target. `report` hears what it takes.

    Raises:
        ConfigError: it does not, with the numbers and what would do.
    """
    kept = work.kept or _heaviest(skeleton, work.num_kept)
    phases = (_teacher(skeleton, work), _student(skeleton, work, kept))
    on_host = _host_bytes(skeleton, work, kept)
    free, free_host = free_device_bytes(device), free_memory()
    is_host = device.type == "cpu"
    beside = f"{gigabytes(on_host)} of the host's for text and checkpoints"
    beside += "" if is_host else f", of which {gigabytes(free_host)} are free"
    report(f"memory: {phases[0]}, then {phases[1]}; of {device}'s memory {gigabytes(free)} are free; {beside}")
    for phase in phases:
        taken = phase.total + (on_host if is_host else 0)
        if taken > free:
            less = "" if phase.weights + on_host * is_host > free else f", or {phase.remedy}"
            raise ConfigError(
                f"TARGET: {phase}, beside {beside}; of {device}'s memory {gigabytes(free)} are free; a machine or a "
                f"--device with {gigabytes(taken)} would do{less}"
            )
    if not is_host and on_host > free_host:
        raise ConfigError(
            f"--text-tokens: {work.text_tokens} with checkpoints take {gigabytes(on_host)} of the host's memory, of "
            f"which {gigabytes(free_host)} are free; fewer, or a smaller --rank, would do"
        )


def _heaviest(skeleton: Skeleton, count: int) -> tuple[int, ...]:
    """The layers of a student where they are not chosen yet, from above: of equal ones the last, all corrected."""
    sizes = [_layer_bytes(skeleton, index) for index in range(len(skeleton.layers))]
    return tuple(sorted(sorted(range(len(sizes)), key=lambda index: (sizes[index], index))[-count:]))


def _teacher(skeleton: Skeleton, work: Work) -> Phase:
    """It writes, row by row, and judges which layers may go."""
    row_bytes = skeleton.kv_shape().row_bytes
    hidden = max(_passed_bytes(skeleton, layer) for layer in skeleton.layers)
    written = 0
    for size in work.written:
        held = size.tokens * row_bytes * (1 + 2 / len(skeleton.layers))  # a layer's are copied where a kernel wants so
        opening = size.num_rows * work.opening_tokens * hidden
        written = max(written, int(held) + opening + _logit_bytes(skeleton, size.num_rows))
    judged = 0 if work.kept else _judging_bytes(skeleton, Size(CHOOSING_ROWS, work.trained.num_places))
    weights = _weight_bytes(skeleton, range(len(skeleton.layers)))
    return Phase("teacher", weights, 0, max(written, judged), "fewer --text-rows or --row-tokens")


def _student(skeleton: Skeleton, work: Work, kept: Sequence[int]) -> Phase:
    """It learns, and is judged in between."""
    size, num_places = skeleton.dtype.itemsize, work.trained.num_places
    corrected = [skeleton.layers[index] for index in kept[num_untouched(kept) :]]
    trained = sum(num_trained(layer, work.rank) for layer in corrected)
    passed = sum(_passed_bytes(skeleton, layer) + _num_linear(layer) * work.rank * size for layer in corrected)
    scores = sum(_score_bytes(skeleton, layer) for layer in corrected) + FLOAT32_BYTES
    learning = (
        passed * work.trained.tokens + work.trained.num_rows * num_places**2 * scores + _logit_bytes(skeleton, CHUNK)
    )
    judging = _judging_bytes(skeleton, work.judged)
    return Phase(
        "student",
        _weight_bytes(skeleton, kept),
        trained * (TRAINED_COPIES * FLOAT32_BYTES + size),  # corrections are used in the data type of the weights
        max(learning, judging),
        "a smaller --batch-rows, --row-tokens or --rank",
    )


def _judging_bytes(skeleton: Skeleton, size: Size) -> int:
    """What measuring an agreement takes: a batch of rows, and logits of as many places as may be answers."""
    tokens = min(size.num_rows, BATCH_ROWS) * size.num_places
    passed = max(
        _passed_bytes(skeleton, layer) + size.num_places * _score_bytes(skeleton, layer) for layer in skeleton.layers
    )
    copies = 1 + _num_capped(skeleton)
    return tokens * (passed + copies * skeleton.vocab_size * skeleton.dtype.itemsize) + _logit_bytes(skeleton, CHUNK)


def _host_bytes(skeleton: Skeleton, work: Work, kept: Sequence[int]) -> int:
    """What the host takes whatever computes: text, which is there twice when it is joined, and checkpoints."""
    written = work.text_tokens + max(size.tokens for size in work.written)
    trained = sum(num_trained(skeleton.layers[index], work.rank) for index in kept[num_untouched(kept) :])
    return 2 * written * ROW_BYTES + SAVED_COPIES * FLOAT32_BYTES * trained


def _weight_bytes(skeleton: Skeleton, layers: Sequence[int]) -> int:
    """Written out in the data type that is computed in, however they are stored."""
    return resident_bytes(skeleton) + sum(_layer_bytes(skeleton, index) for index in layers)


def _layer_bytes(skeleton: Skeleton, index: int) -> int:
    return sum(math.prod(slot.source.shape) for slot in skeleton.layer_slots[index]) * skeleton.dtype.itemsize


def _passed_bytes(skeleton: Skeleton, layer: nn.Module) -> int:
    """What a token's way through a layer leaves for the gradient, from above."""
    size, head_dim, passed = skeleton.dtype.itemsize, skeleton.kv_shape().head_dim, 0
    for module in layer.modules():
        if has_own_products(module):  # experts, whose matrices are stacked
            stacks = [stack.shape for stack in module.parameters(recurse=False) if stack.dim() == STACKED]
            chosen = _num_chosen(skeleton, stacks[0][0])
            passed += EXPERT_COPIES * chosen * sum(sum(shape[1:]) for shape in stacks) * size
    for _, module in trainable(layer):
        shape = module.get_parameter("weight").shape
        if is_linear(module):
            passed += int(PASSED_COPIES * sum(shape)) * size
        else:  # a norm, which computes in float32: of all of a token, or of each of its heads
            width = shape.numel() * (int(skeleton.config.num_attention_heads) if shape.numel() == head_dim else 1)
            passed += width * (FLOAT32_BYTES + size)
    return passed


def _num_chosen(skeleton: Skeleton, num_experts: int) -> int:
    """Experts that a token chooses; all, where the configuration has no word for it that is known."""
    said = (getattr(skeleton.config, name, None) for name in CHOSEN_NAMES)
    return next((int(number) for number in said if number), num_experts)


def _score_bytes(skeleton: Skeleton, layer: nn.Module) -> int:
    """What a query and a key leave of their scores, in all heads, where these are no library's to compute."""
    is_capped = bool(getattr(skeleton.config, "attn_logit_softcapping", None))
    has_sinks = any(name.rpartition(".")[2] == "sinks" for name, _ in layer.named_parameters())
    heads = int(skeleton.config.num_attention_heads) if is_capped or has_sinks else 0
    return SCORE_COPIES * FLOAT32_BYTES * heads


def _num_linear(layer: nn.Module) -> int:
    return sum(is_linear(module) for module in layer.modules())


def _num_capped(skeleton: Skeleton) -> int:
    """Copies of logits that a cap takes."""
    return CAPPED_COPIES if logit_cap(skeleton.config) else 0


def _logit_bytes(skeleton: Skeleton, num_rows: int) -> int:
    """Of what the head makes of so many rows, and of what is made of that for a loss."""
    copies = JUDGED_COPIES + _num_capped(skeleton)
    return num_rows * skeleton.vocab_size * (2 * skeleton.dtype.itemsize + copies * FLOAT32_BYTES)
