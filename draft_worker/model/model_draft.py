"""Runs a model as the engine's Draft: the rows of all parts are one pass, and its answers are the largest logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from bough.grammar.allowed_tokens import AllowedTokens, Grammars
from bough.model.batch.batch import Batch
from bough.model.faults import named_faults
from bough.model.kv.slot import Segment
from bough.model.running.runner import ResidentModel
from bough.model.sampling.sampler import TokenCounts, penalised, within_deviations
from bough.protocol.sampling_params import SamplingParams
from draft_worker.candidates.candidates import Guessing
from draft_worker.engine.job import Stepping
from draft_worker.growth.grower import Candidates

NUM_CONSIDERED = 256  # largest logits of a row
GROUP = 64  # logits whose maximum is found first


def largest(logits: torch.Tensor, num: int) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
    """The `num` largest logits of each row of (num_rows, vocab_size), and their tokens: (num_rows, num), descending.

    On a CPU the threshold is the `num`-th largest of the maxima of groups: at least `num` logits reach it, and few
    more. This is several times as fast as torch.topk. Equal logits are ordered by token. Rows with some NaN give
    unspecified tokens; rows of NaN give NaN.
    """
    num_groups = logits.shape[1] // GROUP
    if logits.device.type != "cpu" or num_groups < num:
        top = logits.topk(min(num, logits.shape[1]), dim=1)
        return top.values.cpu().numpy(), top.indices.cpu().numpy().astype(np.int32)
    maxima = logits[:, : GROUP * num_groups].view(len(logits), GROUP, num_groups).amax(1).numpy()
    maxima[np.isnan(maxima)] = -np.inf  # which sort as the largest
    least = np.partition(maxima, num_groups - num, axis=1)[:, num_groups - num]
    values, tokens = np.full((len(logits), num), np.nan, np.float32), np.zeros((len(logits), num), np.int32)
    for row, numbers in enumerate(logits.numpy()):
        found = np.flatnonzero(numbers >= least[row])
        if len(found):
            best = found[np.argsort(-numbers[found], kind="stable")[:num]]
            values[row, len(best) :] = -np.inf
            values[row, : len(best)], tokens[row, : len(best)] = numbers[best], best
    return values, tokens


class Seen(NamedTuple):
    """Tokens of the vocabulary that occur before or at some nodes."""

    tokens: NDArray[np.int64]  # (num_seen,) ascending
    is_seen: NDArray[np.bool_]  # (num_nodes, num_seen) before or at the node
    counts: NDArray[np.int64]  # (num_nodes, num_seen) occurrences after the prompt

    @classmethod
    def of(
        cls,
        past: TokenCounts,
        paths: NDArray[np.int32],
        positions: NDArray[np.int32],
        prompt_length: int,
        vocab_size: int,
    ) -> Seen:
        """Paths and positions (num_nodes, width) lead from the root to each node; position -1 marks unused places."""
        nodes, places = np.nonzero((positions >= 0) & (paths < vocab_size))
        on_paths, is_output = paths[nodes, places], positions[nodes, places] >= prompt_length
        in_past = past.tokens[: np.searchsorted(past.tokens, vocab_size)]
        tokens = np.union1d(in_past, on_paths)
        of_past, of_paths = np.searchsorted(tokens, in_past), np.searchsorted(tokens, on_paths)
        is_seen = np.zeros((len(paths), len(tokens)), np.bool_)
        is_seen[:, of_past] = True
        is_seen[nodes, of_paths] = True
        counts = np.zeros(is_seen.shape, np.int64)
        counts[:, of_past] = past.num_outputs[: len(in_past)]
        np.add.at(counts, (nodes[is_output], of_paths[is_output]), 1)
        return cls(tokens, is_seen, counts)


@torch.inference_mode()
def adjust(
    logits: torch.Tensor, guessing: Guessing, past: TokenCounts, paths: NDArray[np.int32], positions: NDArray[np.int32]
) -> None:
    """Apply penalties, bias and `min_tokens` in place to logits (num_nodes, vocab_size), as decoding at each node.

    Paths and positions (num_nodes, width) lead from the root to each node; position -1 marks unused places. Paths and
    `past` may contain tokens that only the target has.
    """
    params, vocab_size = guessing.params, logits.shape[1]
    if params.has_penalties:
        _penalise(logits, params, Seen.of(past, paths, positions, guessing.prompt_length, vocab_size))
    biases = {token: bias for token, bias in params.logit_bias.items() if token < vocab_size}
    if biases:
        columns = torch.tensor([*biases], device=logits.device)
        values = torch.tensor([*biases.values()], dtype=logits.dtype, device=logits.device)
        logits.index_copy_(1, columns, logits.index_select(1, columns) + values)
    early = positions.max(axis=1) + 1 - guessing.prompt_length < params.min_tokens
    ends = [token for token in params.stop_token_ids if token < vocab_size]
    if ends and early.any():
        rows = torch.from_numpy(np.flatnonzero(early)).to(logits.device)
        logits[rows[:, None], torch.tensor(ends, device=logits.device)] = -torch.inf
    if guessing.vocab_size:
        logits[:, guessing.vocab_size :] = -torch.inf


def _penalise(logits: torch.Tensor, params: SamplingParams, seen: Seen) -> None:
    """Apply penalties in place to the logits (num_nodes, vocab_size) of the few tokens that occurred."""
    columns = torch.from_numpy(seen.tokens).to(logits.device)
    values = logits.index_select(1, columns).cpu().numpy()
    seen_values = penalised(values.astype(np.float64), seen.counts, params)
    values = np.where(seen.is_seen, seen_values, values).astype(np.float32)
    logits.index_copy_(1, columns, torch.from_numpy(values).to(logits.device))


@torch.inference_mode()
def constrain(
    logits: torch.Tensor, allowed: AllowedTokens, paths: NDArray[np.int32], is_output: NDArray[np.bool_]
) -> None:
    """Set logits (num_nodes, vocab_size) of tokens that may not follow to minus infinity, in place.

    `paths` (num_nodes, width) lead from the root to each node; `is_output` marks the places that are tokens of the
    output. Logits at nodes that the grammar forbids are unchanged: the target never reaches them.
    """
    forbidden = np.zeros(logits.shape, np.bool_)
    outputs = [path[places].tolist() for path, places in zip(paths, is_output, strict=True)]
    for node, following in enumerate(allowed.after_each(outputs)):
        if following is not None:
            np.logical_not(following, out=forbidden[node])
    logits.masked_fill_(torch.from_numpy(forbidden).to(logits.device), -torch.inf)


class Largest(NamedTuple):
    """The largest adjusted logits of a part's rows, as returned by `largest`."""

    values: NDArray[np.float32]
    tokens: NDArray[np.int32]

    def candidates(self, guessing: Guessing, positions: NDArray[np.int32]) -> Candidates:
        """Candidates by the model's probabilities."""
        return guessing.candidates(self.values, self.tokens, positions)


class ModelDraft:
    """A Draft that runs a model."""

    def __init__(self, model: ResidentModel, grammars: Grammars) -> None:
        self._model, self._grammars, self._vocab_size = model, grammars, grammars.vocab_size

    def ask(self, parts: Sequence[Stepping]) -> list[Largest]:
        """The largest adjusted logits of each part's rows. Raises AcceleratorFull or AcceleratorLost."""
        with named_faults(self._model.device):
            return self._asked(parts)

    def _asked(self, parts: Sequence[Stepping]) -> list[Largest]:
        segments = [part.segments() for part in parts]
        readable = [self._readable(segment) for own in segments for segment in own]
        logits = self._model.logits(Batch(readable, None, self._model.device))
        sizes = [sum(len(s) for s in own if s.wants_logits) for own in segments]
        for part, rows in zip(parts, torch.split(logits, sizes), strict=True):
            self._adjust(part, rows)
            if part.session.guessing is not None:
                _exclude(rows, part.session.guessing.params)
        values, tokens = largest(logits, NUM_CONSIDERED)
        ends = np.cumsum(sizes)[:-1]
        rows_of = zip(np.split(values, ends), np.split(tokens, ends), strict=True)
        return [Largest(*own) for own in rows_of]

    def _readable(self, segment: Segment) -> Segment:
        """Replace tokens that only the target has with token 0: guesses after them matter little."""
        is_known = segment.tokens < self._vocab_size
        return segment if is_known.all() else replace(segment, tokens=np.where(is_known, segment.tokens, 0))

    def _adjust(self, part: Stepping, logits: torch.Tensor) -> None:
        """Apply penalties, logit bias and grammar in place to logits (num_rows, vocab_size)."""
        session, wanted = part.session, part.wanted
        if wanted is None or session.guessing is None or not session.guessing.adjusts(logits.shape[1]):
            return
        paths, positions = session.explored.path_tokens(wanted), session.path_positions(wanted)
        adjust(logits, session.guessing, session.past, paths, positions)
        grammar, salt = session.guessing.params.grammar, session.cache_salt
        session.allowed = allowed = self._grammars.along(grammar, session.allowed, salt)
        if allowed is not None:
            prompt_length = session.guessing.prompt_length
            allowed.stand_on(session.tokens[prompt_length:])
            constrain(logits, allowed, paths, positions >= prompt_length)


@torch.inference_mode()
def _exclude(logits: torch.Tensor, params: SamplingParams) -> None:
    """Apply in place to logits (num_rows, vocab_size) the adjustments that need whole rows, as the target does."""
    if params.top_n_sigma > 0.0 and not params.is_greedy:
        logits.copy_(torch.from_numpy(within_deviations(logits.cpu().numpy(), params)))


def warm_up_choosing(vocab_size: int, device: torch.device) -> None:
    """Compile the parts of a step outside the model: choose the largest of some logits, perturbed like the target's."""
    values, tokens = largest(torch.zeros(1, vocab_size, device=device), NUM_CONSIDERED)
    guessing = Guessing(SamplingParams(temperature=1.0), 0, is_sample=False, is_perturbed=True)
    guessing.candidates(values, tokens, np.zeros(1, np.int32))
