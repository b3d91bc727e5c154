"""A draft without weights: the real engine, sessions and growers, with steps that only sleep."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from bough.config.processes import DraftConfig
from bough.config.reader import at_most
from bough.errors import ConfigError
from bough.grammar.allowed_tokens import Grammars
from bough.model.kv.arena import Arena
from bough.model.sampling.draft_sampler import GREEDY_TOKENS, greedy_weights
from bough.protocol.generation import WorkerInfo
from bough.runtime.kv_budget import MOST_BYTES
from bough.simulation.clock import SimulatedClock
from bough.simulation.hashing import key_of, mixed
from bough.simulation.pair import SimulatedPair
from bough.simulation.text_model import TextModel
from bough.simulation.true_text import TrueText, text_seed
from bough.trees.tree_plan import MAX_EXPANSIONS
from draft_worker.candidates.candidates import Guessing, TemperatureScalings
from draft_worker.engine.draft_ahead import MAX_ROWS, num_steps
from draft_worker.engine.engine import DraftEngine
from draft_worker.engine.job import Stepping
from draft_worker.engine.session import DraftSession, Window
from draft_worker.engine.session_pool import SessionPool
from draft_worker.growth.grower import Candidates
from draft_worker.service import ServedDraft

ROW_BYTES = 32 * 1024  # KV bytes of a token, as of a 1B model; reported, but never allocated


class Stated(NamedTuple):
    """The text model's answer about some nodes."""

    text_model: TextModel
    paths: NDArray[np.int32]  # (num_nodes, width) tokens from the root to each node
    is_used: NDArray[np.bool_]  # (num_nodes, width) places that are on the path
    text: NDArray[np.int32]  # (width,) the true tokens below the root

    def candidates(self, guessing: Guessing, positions: NDArray[np.int32]) -> Candidates:
        """Candidates by rank, independent of temperature and filters; greedy weights at temperature 0."""
        is_right = ((self.paths[:, 1:] == self.text[:-1]) | ~self.is_used[:, 1:]).all(axis=1)
        salts, depths = mixed(*np.where(self.is_used, self.paths, 0).T), self.is_used.sum(axis=1) - 1
        seed, true_tokens = text_seed(guessing.params), self.text[depths]
        stated = self.text_model.candidates(seed, is_right, positions, salts, depths, true_tokens)
        if guessing.is_sample and guessing.params.is_greedy:
            num = min(GREEDY_TOKENS, stated.tokens.shape[1])
            weights = np.broadcast_to(np.log(greedy_weights(num)), (len(positions), num))
            return Candidates(stated.tokens[:, :num], weights.astype(np.float32))
        return Candidates(*stated)


class SimulatedDraft:
    """Sleeps for a profile's time in each step of all sessions, and answers by the profile's text model."""

    def __init__(self, pair: SimulatedPair, clock: SimulatedClock, grammars: Grammars) -> None:
        self._pair, self._clock, self._grammars = pair, clock, grammars
        self._texts: WeakKeyDictionary[DraftSession, TrueText] = WeakKeyDictionary()  # of the trees that grow
        self._random = Random(key_of(f"draft {pair.name}"))

    def ask(self, parts: Sequence[Stepping]) -> list[Stated]:
        """Return after the time that a step with these rows takes."""
        began = self._clock.now()
        draft, factors = self._pair.profile.draft, self._pair.profile.factors_at(began)
        segments = [segment for part in parts for segment in part.segments()]
        num_rows = sum(len(segment) for segment in segments if segment.wants_logits)
        num_context = sum(len(segment) for segment in segments if not segment.wants_logits)
        answers = [self._answer(part) for part in parts]
        self._clock.sleep_until(began + draft.step(num_rows, num_context, factors, self._random))
        return answers

    def _answer(self, part: Stepping) -> Stated:
        session, wanted, model = part.session, part.wanted, self._pair.text_model
        if wanted is None or not len(wanted.depths):  # no candidates are requested before the context is complete
            nothing = np.zeros((0, 1), np.int32)
            return Stated(model, nothing, nothing.astype(np.bool_), nothing[:, 0])
        assert session.guessing is not None, "a call has requested candidates"
        params, prompt_length = session.guessing.params, session.guessing.prompt_length
        paths, is_used = session.explored.path_tokens(wanted), session.path_positions(wanted) >= 0
        root, text = int(paths[0, 0]), self._texts.get(session)
        if text is None or not text.is_below(session.tokens, root, params):
            session.allowed = allowed = self._grammars.along(params.grammar, session.allowed, session.cache_salt)
            text = self._texts[session] = TrueText(model, params, session.tokens, root, prompt_length, allowed)
        return Stated(model, paths, is_used, np.array([text[place] for place in range(paths.shape[1])], np.int32))


class SimulatedDraftWorker(ServedDraft):
    """A draft worker with the times and limits of a profile."""

    def __init__(self, config: DraftConfig, worker_id: str, pair: SimulatedPair, clock: SimulatedClock) -> None:
        """Raises ConfigError if --kv-memory does not hold a session."""
        super().__init__(config, worker_id, config.model_name or f"{pair.name}-draft")
        self._pair = pair
        self.tokenizer, self.vocab_size = pair.tokenizer, pair.vocab_size
        self.grammars = Grammars(self.tokenizer, self.vocab_size)
        num_rows, max_positions = (config.kv_memory or MOST_BYTES) // ROW_BYTES, pair.profile.target.max_context
        max_context = min(at_most(config, "max_context", max_positions), num_rows - MAX_EXPANSIONS)
        self._window = Window(max_context, max_positions)
        if self._window.max_context < 1:
            least = (MAX_EXPANSIONS + 1) * ROW_BYTES
            raise ConfigError(f"--kv-memory: must be at least {least}, for one session, got {config.kv_memory}")
        ahead_steps = num_steps(config.ahead_steps, "cpu")
        arena = Arena(num_rows, ROW_BYTES, rows_to_keep=lambda slot: slot.num_rows)
        pool = SessionPool(arena, self._window, ahead_steps * MAX_ROWS)
        draft, scalings = SimulatedDraft(pair, clock, self.grammars), TemperatureScalings(config.inverse_temperature)
        self._engine = DraftEngine(draft, self.vocab_size, config.max_children, pool, ahead_steps, scalings)
        self._start_thread()

    @property
    def max_nodes(self) -> int:
        """The lower of the target's limit and the setting."""
        return at_most(self._config, "max_nodes", self._pair.profile.target.max_nodes)

    def info(self) -> WorkerInfo:
        """The simulated model, and a note that it is simulated."""
        return self._info(
            model_description="simulated draft",
            model_fingerprint=self._pair.fingerprint,
            max_context=self._window.max_context,
            max_nodes=self.max_nodes,
            max_sessions=self._engine.pool.num_bytes // (self._window.max_rows * ROW_BYTES),
            notes=(*self._pair.notes(), *self._engine.scalings.notes(), *self._metrics_note),
        )
