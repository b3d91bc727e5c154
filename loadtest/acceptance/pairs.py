"""Pairs of target and draft distributions: synthetic, or computed by a model and its substitute."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from bough.model.batch.batch import Batch, Segment
from bough.model.checkpoint.checkpoint import Checkpoint
from bough.model.checkpoint.tokenizer_files import load_tokenizer_files
from bough.model.kv.session_kv import KVSlot
from bough.model.running.runner import ResidentModel
from bough.model.sampling.sampler import Row, draw, probabilities
from bough.protocol.sampling_params import SamplingParams
from bough.tokenization.tokenizer import Tokenizer
from bough.trees.draft_probs import normalised
from bough.trees.tree import Tree
from draft_worker.model.sources import load_draft
from loadtest.acceptance.rates import Pair, draft_weights
from loadtest.common.prompts import load_prompts

CPU = torch.device("cpu")
MAX_TOKENS = 64  # likeliest tokens from which a draft takes children
SPREADS = {"close": 0.5, "fair": 1.0, "poor": 2.0}  # standard deviation of the draft's logits from the target's
SYNTHETIC_VOCAB = 1000

Logits = tuple[Row, Row]  # of the target and of the draft, (vocab_size,) each


def pair_of(logits: Logits, params: SamplingParams) -> Pair:
    """The pair of distributions at these sampling parameters."""
    target_probs = probabilities(logits[0], params)
    tokens, weights = draft_weights(logits[1], params, MAX_TOKENS)
    on_tokens = target_probs[tokens]
    return Pair(np.append(on_tokens, max(0.0, 1.0 - on_tokens.sum())), normalised(weights))


def synthetic(spread: float, num: int, seed: int) -> Iterator[Logits]:
    """The target's logits fall with the logarithm of a token's rank, with noise; the draft's are off by `spread`."""
    rng = np.random.default_rng(seed)
    for _ in range(num):
        exponent = rng.uniform(0.5, 3.0)
        target = rng.normal(-exponent * np.log(np.arange(1, SYNTHETIC_VOCAB + 1)), 1.0)
        yield target, rng.normal(target, spread)


class Models(NamedTuple):
    """A target and its substitute."""

    target: ResidentModel
    draft: ResidentModel
    prompts: list[list[int]]  # token ids of the shipped prompts

    @classmethod
    def load(cls, folder: Path, drop_layers: tuple[int, ...], num_prompts: int) -> Models:
        """Load both models in bfloat16."""
        checkpoint = Checkpoint.open(folder)
        tokenizer = Tokenizer(load_tokenizer_files(folder))
        prompts = [tokenizer.encode_chat([("user", text)]) for text in load_prompts()[:num_prompts]]
        target, draft = (load_draft(checkpoint, layers, "bfloat16", CPU) for layers in ((), drop_layers))
        return cls(target, draft, prompts)

    def texts(self, length: int, params: SamplingParams) -> list[list[int]]:
        """Token ids of each prompt with an answer of `length` tokens sampled by the target."""
        return [_continued(self.target, prompt, length, params) for prompt in self.prompts]


def from_models(models: Models, texts: Sequence[list[int]]) -> list[Logits]:
    """Yield both models' logits at each position of the answers."""
    return [
        logits
        for text, prompt in zip(texts, models.prompts, strict=True)
        for logits in zip(*(_read(model, text)[len(prompt) - 1 : -1] for model in models[:2]), strict=True)
    ]


def _continued(model: ResidentModel, prompt: list[int], length: int, params: SamplingParams) -> list[int]:
    slot = KVSlot(model.skeleton.kv_shape(), len(prompt) + length + 1, CPU)
    tokens = list(prompt)
    while len(tokens) < len(prompt) + length:
        row = read_on(model, slot, tokens)[-1].astype(np.float64)
        tokens.append(draw(row, params, len(tokens)))
    return tokens


def _read(model: ResidentModel, tokens: list[int]) -> list[Row]:
    """Logits (num_tokens, vocab_size) after each token."""
    slot = KVSlot(model.skeleton.kv_shape(), len(tokens), CPU)
    return list(read_on(model, slot, tokens).astype(np.float64))


def read_on(model: ResidentModel, slot: KVSlot, tokens: Sequence[int]) -> NDArray[np.float32]:
    """Compute the tokens that the slot does not hold yet; returns the logits after each of them."""
    held, new = slot.length, tokens[slot.length :]
    chain = Tree.of(new, list(range(-1, len(new) - 1)), [0.0] * len(new))
    logits = model.logits(Batch([Segment.tree(slot, held, chain)], None, CPU)).numpy().copy()
    slot.compact(range(held, len(tokens)), new)
    return logits
