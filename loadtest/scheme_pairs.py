"""Pairs of a target's and a draft's distributions: made by rule, or read from a model and its substitute."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from bough.draft_probs import normalised
from bough.model.batch import Batch, Segment
from bough.model.checkpoint import Checkpoint
from bough.model.draw import Row, draw, probabilities
from bough.model.kv import KVSlot
from bough.model.runner import ResidentModel
from bough.model.sample import draft_weights
from bough.model.tokenizer_files import load_tokenizer_files
from bough.sampling import SamplingParams
from bough.tokenizer import Tokenizer
from bough.tree import Tree
from draft_worker.sources import load_draft
from loadtest.prompts import load_prompts
from loadtest.scheme_rates import Pair

CPU = torch.device("cpu")
MAX_TOKENS = 64  # that a draft takes its children from
SPREADS = {"close": 0.5, "fair": 1.0, "poor": 2.0}  # standard deviation of the draft's logits from the target's
SYNTHETIC_VOCAB = 1000

Logits = tuple[Row, Row]  # of the target and of the draft, (vocab_size,) each


def pair_of(logits: Logits, params: SamplingParams) -> Pair:
    """As a verifier and a draft would see them at these parameters."""
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


def from_models(
    folder: Path, drop_layers: tuple[int, ...], num: int, length: int, seed: int, temperature: float = 1.0
) -> list[Logits]:
    """Of a model and its substitute at each of `length` places of `num` answers that the model sampled itself.

    The answers come after bough's prompts, one after another.
    """
    checkpoint = Checkpoint.open(folder)
    target = load_draft(checkpoint, (), "bfloat16", CPU)
    tokenizer = Tokenizer(load_tokenizer_files(folder))
    prompts = [tokenizer.encode_chat([("user", text)]) for text in load_prompts()[:num]]
    texts = [
        _continued(target, prompt, length, SamplingParams(temperature=temperature, seed=seed)) for prompt in prompts
    ]
    draft = load_draft(checkpoint, drop_layers, "bfloat16", CPU)
    return [
        logits
        for text, prompt in zip(texts, prompts, strict=True)
        for logits in zip(
            _read(target, text)[len(prompt) - 1 : -1], _read(draft, text)[len(prompt) - 1 : -1], strict=True
        )
    ]


def _continued(model: ResidentModel, prompt: list[int], length: int, params: SamplingParams) -> list[int]:
    slot = KVSlot(model.skeleton.kv_shape(), len(prompt) + length + 1, CPU)
    tokens, held = list(prompt), 0
    while len(tokens) < len(prompt) + length:
        new = tokens[held:]
        chain = Tree.of(new, list(range(-1, len(new) - 1)), [0.0] * len(new))
        row = model.logits(Batch([Segment.tree(slot, held, chain)], None, CPU))[-1].double().numpy()
        slot.compact(range(held, len(tokens)), new)
        held = len(tokens)
        tokens.append(draw(row, params, len(tokens)))
    return tokens


def _read(model: ResidentModel, tokens: list[int]) -> list[Row]:
    """Logits after each token."""
    slot = KVSlot(model.skeleton.kv_shape(), len(tokens), CPU)
    chain = Tree.of(tokens, list(range(-1, len(tokens) - 1)), [0.0] * len(tokens))
    return list(model.logits(Batch([Segment.tree(slot, 0, chain)], None, CPU)).numpy().astype(np.float64))
