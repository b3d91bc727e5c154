"""Sampling parameters and stop conditions of a request; `bough.model.sampling.sampler` applies them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from bough.errors import InvalidRequest

MAX_LOGPROBS = 64
MAX_BIASES = 1024  # sent with every call to a worker, as stop tokens are
MAX_STOP_TOKENS = 1024
MAX_STOPS = 64  # each is searched for in all generated text
MAX_STOP_LENGTH = 1024  # characters
MAX_CHOICES = 1024  # of which the output is one
MAX_GRAMMAR = 128 * 1024  # characters; sent with every call to a worker
MAX_SEED = 2**64 - 1
BANNED = -math.inf  # a logit bias


def _require(condition: bool, name: str, value: object, must_be: str) -> None:
    if not condition:
        raise InvalidRequest(f"{name}: must be {must_be}, got {value!r}")


def _require_number(name: str, number: int, most: int) -> None:
    if number > most:
        raise InvalidRequest(f"{name}: must have at most {most} entries, got {number}")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Parameters of a token's distribution; the defaults leave the model's own unchanged."""

    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0 keeps all
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0  # counts prompt and output (arXiv 1909.05858)
    presence_penalty: float = 0.0  # counts the output only
    frequency_penalty: float = 0.0  # counts the output only
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # BANNED excludes a token
    logprobs: int | None = None  # number of alternatives to report; None reports no logprobs
    stop_token_ids: frozenset[int] = frozenset()
    grammar: str = ""  # of llguidance, as JSON or Lark, which the whole output follows; empty leaves it free
    min_tokens: int = 0  # of the output, before which stop tokens are not drawn

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        """Whether a penalty makes logits depend on earlier tokens outside the model."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def is_plain_greedy(self) -> bool:
        """Whether nothing is asked of a token's logits but which is the largest."""
        changes = self.has_penalties or self.logit_bias or self.grammar
        return self.is_greedy and not changes and self.logprobs is None

    def validate(self, vocab_size: int) -> None:
        """Raises InvalidRequest naming the first field out of its range."""
        warm, within_two = "0 (greedy), or a number in [0.0001, 10000]", "a number in [-2, 2]"
        for name, is_fine, must_be in (
            ("temperature", self.is_greedy or 1e-4 <= self.temperature <= 1e4, warm),
            ("top_k", self.top_k >= 0, "0 (off) or more"),
            ("top_p", 0 < self.top_p <= 1, "a number in (0, 1]"),
            ("min_p", 0 <= self.min_p <= 1, "a number in [0, 1]"),
            ("seed", 0 <= self.seed <= MAX_SEED, "an unsigned 64-bit number"),
            ("repetition_penalty", 0.01 <= self.repetition_penalty <= 100, "a number in [0.01, 100]"),
            ("presence_penalty", -2 <= self.presence_penalty <= 2, within_two),
            ("frequency_penalty", -2 <= self.frequency_penalty <= 2, within_two),
            ("logprobs", 0 <= (self.logprobs or 0) <= MAX_LOGPROBS, f"0 to {MAX_LOGPROBS}"),
        ):
            _require(is_fine, name, getattr(self, name), must_be)
        for name, most in (("logit_bias", MAX_BIASES), ("stop_token_ids", MAX_STOP_TOKENS)):
            _require_number(name, len(getattr(self, name)), most)
        for token, bias in self.logit_bias.items():
            _require(0 <= token < vocab_size, "logit_bias", token, f"a token id below {vocab_size}")
            is_number = abs(bias) <= 1000 or bias == BANNED
            _require(is_number, f"logit_bias[{token}]", bias, "a number in [-1000, 1000], or -inf to ban it")
        banned = {token for token, bias in self.logit_bias.items() if bias == BANNED}
        if len(banned) == vocab_size:
            raise InvalidRequest(f"logit_bias: must leave at least one token, got all {vocab_size} banned")
        if self.min_tokens and len(banned | self.stop_token_ids) == vocab_size:
            raise InvalidRequest(f"min_tokens: must be 0 where any token ends the output, got {self.min_tokens}")
        if len(self.grammar) > MAX_GRAMMAR:
            raise InvalidRequest(f"grammar: must be at most {MAX_GRAMMAR} characters, got {len(self.grammar)}")
        for token in self.stop_token_ids:
            _require(0 <= token < vocab_size, "stop_token_ids", token, f"a token id below {vocab_size}")


UNLIMITED = 2**31 - 1  # max_tokens of an output that goes on to the end of the context: none holds as many


@dataclass(frozen=True, slots=True)
class StopConditions:
    """Limits and stop texts that end the output; stop token ids are in SamplingParams, as drafts need them too."""

    max_tokens: int = 256
    stop: tuple[str, ...] = ()
    include_stop: bool = False  # in the text, also the stop token's

    def validate(self, least_tokens: int = 1) -> None:
        """Raises InvalidRequest naming the first field out of its range."""
        _require(self.max_tokens >= least_tokens, "max_tokens", self.max_tokens, f"{least_tokens} or more")
        _require_number("stop", len(self.stop), MAX_STOPS)
        for index, text in enumerate(self.stop):
            _require(text != "", f"stop[{index}]", text, "a non-empty text")
            if len(text) > MAX_STOP_LENGTH:
                raise InvalidRequest(f"stop[{index}]: must be at most {MAX_STOP_LENGTH} characters, got {len(text)}")


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token and its natural log-probability by the target, before temperature, penalties and filters."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    """Log-probabilities of the emitted token and of the most probable tokens, best first."""

    token: TokenLogprob
    top: tuple[TokenLogprob, ...] = ()
