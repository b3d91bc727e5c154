"""A target without weights: the real engine, slots and services, with sweeps that only sleep."""

from __future__ import annotations

import time
from collections.abc import Sequence
from random import Random

import numpy as np

from bough.config.processes import TargetConfig
from bough.config.reader import at_most
from bough.errors import InvalidRequest
from bough.grammar.allowed_tokens import AllowedTokens, Grammars
from bough.model.kv.arena import Arena
from bough.model.kv.slot import Slot
from bough.model.sizes.target_limits import TargetLimits
from bough.protocol.generation import WorkerInfo
from bough.protocol.messages import Timings, Verdict
from bough.protocol.sampling_params import PositionLogprobs, TokenLogprob
from bough.simulation.clock import SimulatedClock
from bough.simulation.hashing import key_of
from bough.simulation.pair import SimulatedPair
from bough.simulation.profile import ROW_BYTES
from bough.simulation.reading import refusal
from bough.simulation.text_model import TextModel
from bough.simulation.true_text import TrueText, text_seed
from bough.sizing.row_counts import RowCounts
from bough.sizing.sweep_times import SweepTimes
from target_worker.kv.slot_pool import SlotPool
from target_worker.scheduler.batching import Part
from target_worker.scheduler.engine import SweepEngine
from target_worker.scheduler.job import Swept, VerifyJob
from target_worker.service import ServedTarget
from target_worker.verification.verify import walk

COUNTED_EXPERTS = 1000  # that one row is reported to choose, in all layers together


class SimulatedSweeper:
    """Sleeps for the seconds of a profile; accepts the part of a tree that equals the profile's true text."""

    def __init__(self, pair: SimulatedPair, clock: SimulatedClock, grammars: Grammars) -> None:
        self._pair, self._clock, self._grammars = pair, clock, grammars
        self._random = Random(key_of(f"target {pair.name}"))
        self.rows = RowCounts(most=pair.profile.target.chunk_rows, step=pair.profile.target.row_step)

    def sweep(self, parts: Sequence[Part[VerifyJob]]) -> Swept:
        """Return after the time that a sweep of these rows takes."""
        began = self._clock.now()
        profile, num_rows = self._pair.profile, sum(part.num_tokens for part in parts)
        target, factors = profile.target, profile.factors_at(began)
        seconds = target.sweep(num_rows, factors, self._random)
        self._clock.sleep_until(began + seconds.total)
        total_ns = self._clock.real_ns(self._clock.now() - began)
        wait_ns = self._clock.real_ns(seconds.waited)
        timings = Timings(
            total_ns,
            wait_ns=wait_ns,
            compute_ns=total_ns - wait_ns,
            link_ns=self._clock.real_ns(seconds.link),
            link_bytes=target.link_bytes(num_rows),
            num_passes=1,
            link_ideal_ns=self._clock.real_ns(target.link_seconds_of(num_rows)),
            num_experts=round(target.expert_ratio(num_rows) * COUNTED_EXPERTS),
            row_experts=COUNTED_EXPERTS if target.experts is not None else 0,
        )

        def verdict_on(job: VerifyJob) -> Verdict:
            grammar, salt = job.call.sampling.grammar, job.call.context.cache_salt
            job.session.allowed = allowed = self._grammars.along(grammar, job.session.allowed, salt)
            return verdict_by(self._pair.text_model, job, allowed)

        return Swept(timings, verdict_on)

    def warm_up(self, slot: Slot, most_rows: int) -> SweepTimes:
        """The profile's times, without jitter and events; there is nothing to prepare."""
        return self._pair.profile.target.known_times(self._clock.real_seconds(1.0))


def verdict_by(model: TextModel, job: VerifyJob, allowed: AllowedTokens | None = None) -> Verdict:
    """Accept the true text as far as the tree contains it, with the next token as bonus."""
    call, tree = job.call, job.tree
    if call.is_given:
        raise InvalidRequest(
            "prompt_logprobs", "must be left out, as simulated workers know no probabilities of a prompt"
        )
    root, prompt_length = int(tree.tokens[0]), call.context.prompt_length
    text = TrueText(model, call.sampling, job.text.tokens, root, prompt_length, allowed)
    verdict = walk(tree, lambda path: text[len(path) - 1])
    if call.sampling.logprobs is None:
        return verdict
    seed, first = text_seed(call.sampling), call.context.base_length + 1  # position of the token after the root
    num_top, places = call.sampling.logprobs, range(len(verdict.accepted_nodes) + 1)
    logprobs = tuple(position_logprobs(model, seed, first + place, text[place], num_top) for place in places)
    return verdict._replace(logprobs=logprobs)


def position_logprobs(model: TextModel, seed: int, position: int, token: int, num_top: int) -> PositionLogprobs:
    """Log-probabilities of the true token at a position and of the `num_top` likeliest; all are finite.

    Tokens that the draft does not propose share the remaining probability equally.
    """
    here = np.array([position])
    true_tokens = np.array([token], np.int32)
    (tokens,), (stated,) = model.candidates(seed, np.array([True]), here, true_tokens=true_tokens)
    named = {int(each): float(log_prob) for each, log_prob in zip(tokens, stated, strict=True)}
    rest = max(1.0 - float(np.exp(stated.astype(np.float64)).sum()), 1e-9) / (model.num_words - model.num_ranks)
    best = sorted(named.items(), key=lambda item: -item[1])[:num_top]
    top = tuple(TokenLogprob(each, log_prob) for each, log_prob in best)
    return PositionLogprobs(TokenLogprob(token, named.get(token, float(np.log(rest)))), top)


class SimulatedTarget(ServedTarget):
    """A target with a profile's limits, or the settings' if they are lower and not defaults."""

    def __init__(self, config: TargetConfig, worker_id: str, pair: SimulatedPair, clock: SimulatedClock) -> None:
        """Raises ConfigError if the profile's KV tokens do not hold a session."""
        super().__init__(config, worker_id, config.model_name or pair.name)
        self._pair, profile = pair, pair.profile.target
        self.tokenizer, self.vocab_size = pair.tokenizer, pair.vocab_size
        self.grammars = Grammars(self.tokenizer, self.vocab_size)
        self.max_nodes = at_most(config, "max_nodes", profile.max_nodes)
        max_sweep_tokens = max(at_most(config, "max_sweep_tokens", profile.max_sweep_rows), self.max_nodes)
        max_context = min(at_most(config, "max_context", profile.max_context), profile.kv_tokens - self.max_nodes)
        if max_context < 1:
            raise refusal("target.kv_tokens", profile.kv_tokens, f"more than the nodes of a tree, {self.max_nodes}")
        self._limits = TargetLimits(profile.row_step, max_sweep_tokens, self.max_nodes, max_context)
        arena = Arena(profile.kv_tokens, ROW_BYTES)
        pool = SlotPool(arena, config.lease_seconds, time.monotonic, self._limits.kv_step)
        sweeper = SimulatedSweeper(pair, clock, self.grammars)
        self._engine = SweepEngine(
            sweeper, pool, self._limits, config.max_waiting, config.gather, self._metrics.observe
        )
        self._start_engine()

    def _context_limit(self, own: int) -> str:
        """What keeps sessions below `own` tokens, the profile's limit; empty if nothing does."""
        if self._limits.max_context >= own:
            return ""
        name = "--max-context of the target" if self._config.max_context else "kv_tokens of the profile"
        return f"{name}; the profile's own limit is {own}"

    def info(self) -> WorkerInfo:
        """The simulated model, and a note that it is simulated."""
        profile = self._pair.profile.target
        kv = f"KV of {profile.kv_tokens} tokens is counted as {ROW_BYTES // 1024} KB each, and not allocated"
        return self._info(
            model_description="simulated target",
            model_fingerprint=self._pair.fingerprint,
            max_context=self._limits.max_context,
            context_limit=self._context_limit(profile.max_context),
            max_sessions=profile.kv_tokens // self._limits.slot_rows,
            link_bytes_per_pass=profile.link_bytes(1),
            notes=(*self._pair.notes(), kv, *self._metrics_note),
            arithmetic="simulated: text by seed and position",
            weights_hash=self._pair.fingerprint,  # the model has no other bytes
        )
