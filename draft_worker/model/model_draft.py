"""Runs a model as the engine's Draft: the rows of all parts are one pass, and its answers are the largest logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from bough.grammar.allowed_tokens import Grammars
from bough.model.batch.batch import Batch
from bough.model.faults import named_faults
from bough.model.kv.segment import Segment
from bough.model.running.runner import ResidentModel
from bough.model.sampling.sampler import within_deviations
from bough.protocol.sampling_params import SamplingParams
from draft_worker.candidates.adjust import adjust, constrain
from draft_worker.candidates.candidates import Guessing
from draft_worker.candidates.top_k import largest
from draft_worker.engine.job import Stepping
from draft_worker.growth.grower import Candidates

NUM_CONSIDERED = 256  # largest logits of a row


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
        """Replace tokens that only the target has by token 0: guesses after them matter little."""
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
    """Apply in place to logits (num_rows, vocab_size) what needs whole rows, as the target has them."""
    if params.top_n_sigma > 0.0 and not params.is_greedy:
        logits.copy_(torch.from_numpy(within_deviations(logits.cpu().numpy(), params)))


def warm_up_choosing(vocab_size: int, device: torch.device) -> None:
    """Compile what a step needs besides the model: choose the largest of some logits, perturbed as by the target."""
    values, tokens = largest(torch.zeros(1, vocab_size, device=device), NUM_CONSIDERED)
    guessing = Guessing(SamplingParams(temperature=1.0), 0, is_sample=False, is_perturbed=True)
    guessing.candidates(values, tokens, np.zeros(1, np.int32))
