"""Sampling parameters and stop conditions of a request; `bough.model.sampling.sampler` applies them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from bough.errors import InvalidRequest

MAX_LOGPROBS = 64
MAX_BIASES = 1024  # sent with every call to a worker, as stop tokens are
MAX_STOP_TOKENS = 1024
MAX_STOPS = 64  # each is searched in all generated text
MAX_STOP_LENGTH = 1024  # characters
MAX_CHOICES = 1024  # allowed outputs
MAX_GRAMMAR = 128 * 1024  # characters; sent with every call to a worker
MAX_UINT32 = 2**32 - 1
MAX_SEED = 2**64 - 1
BANNED = -math.inf  # a logit bias


def _require(condition: bool, name: str, value: object, must_be: str) -> None:
    if not condition:
        raise InvalidRequest(name, f"must be {must_be}", repr(value))


def _require_number(name: str, number: int, most: int) -> None:
    if number > most:
        raise InvalidRequest(name, f"must have at most {most} entries", number)


@dataclass(frozen=True, slots=True)
class Parameter:
    """Describes a numeric sampling parameter: flags, HTTP fields and checks are generated from it.

    The values are integers if the limits are.
    """

    help: str
    least: int | float
    most: int | float
    is_open: bool = False  # the range excludes the least number
    zero: str = ""  # the meaning of 0, if 0 is valid though below the range

    def __contains__(self, value: float) -> bool:
        is_end = self.is_open and value == self.least
        return (self.zero != "" and value == 0) or (self.least <= value <= self.most and not is_end)

    def __str__(self) -> str:
        """The valid values in words."""
        if isinstance(self.most, int):
            return f"{self.least} to {self.most}"
        numbers = f"a number in {'(' if self.is_open else '['}{self.least:g}, {self.most:g}]"
        return f"0 ({self.zero}), or {numbers}" if self.zero else numbers

    @property
    def kind(self) -> type[float]:
        """`int` or `float`."""
        return type(self.most)

    @property
    def schema(self) -> dict[str, Any]:
        """The range as JSON Schema."""
        if self.zero:
            return {"minimum": 0, "maximum": self.most, "not": {"exclusiveMinimum": 0, "exclusiveMaximum": self.least}}
        return {"exclusiveMinimum" if self.is_open else "minimum": self.least, "maximum": self.most}


def _parameter(default: Any, *description: Any, **more: Any) -> Any:
    return field(default=default, metadata={"parameter": Parameter(*description, **more)})


@dataclass(frozen=True, slots=True)
class Sampling:
    """A request's parameters of the token distribution; the defaults leave the model's distribution unchanged."""

    temperature: float = _parameter(1.0, "0 is greedy (default 1)", 1e-4, 1e4, zero="greedy")
    top_k: int = _parameter(0, "only the k likeliest tokens are drawn; 0 is off (default)", 0, MAX_UINT32)
    top_p: float = _parameter(1.0, "only the likeliest, which sum to this; 1 is off (default)", 0.0, 1.0, is_open=True)
    min_p: float = _parameter(0.0, "drop what is below this share of the likeliest; 0 is off (default)", 0.0, 1.0)
    seed: int | None = _parameter(None, "equal seeds give equal tokens; random by default", 0, MAX_SEED)
    # arXiv 1909.05858
    repetition_penalty: float = _parameter(1.0, "on tokens in prompt and output; 1 is off (default)", 0.01, 100.0)
    presence_penalty: float = _parameter(0.0, "on tokens in the output; 0 is off (default)", -2.0, 2.0)
    frequency_penalty: float = _parameter(0.0, "on tokens, for each time in the output; 0 is off (default)", -2.0, 2.0)
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # BANNED excludes a token
    logprobs: int | None = _parameter(None, "report log-probabilities, with so many alternatives", 0, MAX_LOGPROBS)
    stop_token_ids: frozenset[int] = frozenset()
    min_tokens: int = _parameter(0, "tokens before which nothing ends the output", 0, MAX_UINT32)
    top_n_sigma: float = _parameter(
        0.0,
        "only tokens within so many standard deviations of the largest logit; 0 is off (default)",
        -1.0,
        100.0,
    )


PARAMETERS: Mapping[str, Parameter] = {
    each.name: each.metadata["parameter"] for each in fields(Sampling) if each.metadata
}  # by the names of their fields


@dataclass(frozen=True, slots=True)
class SamplingParams(Sampling):
    """All parameters of a token's distribution, as workers know them and the index records them."""

    seed: int = 0
    grammar: str = ""  # for llguidance, as JSON or Lark; the whole output follows it; empty is free

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        """Whether a penalty makes logits depend on earlier tokens outside the model."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def is_plain_greedy(self) -> bool:
        """Whether only the token with the largest logit matters."""
        changes = self.has_penalties or self.logit_bias or self.grammar
        return self.is_greedy and not changes and self.logprobs is None

    def validate(self, vocab_size: int) -> None:
        """Raises InvalidRequest naming the first field out of its range."""
        for name, parameter in PARAMETERS.items():
            value = getattr(self, name)
            _require(value is None or value in parameter, name, value, str(parameter))
        for name, most in (("logit_bias", MAX_BIASES), ("stop_token_ids", MAX_STOP_TOKENS)):
            _require_number(name, len(getattr(self, name)), most)
        for token, bias in self.logit_bias.items():
            _require(0 <= token < vocab_size, "logit_bias", token, f"a token id below {vocab_size}")
            is_number = abs(bias) <= 1000 or bias == BANNED
            _require(is_number, f"logit_bias[{token}]", bias, "a number in [-1000, 1000], or -inf to ban it")
        banned = {token for token, bias in self.logit_bias.items() if bias == BANNED}
        if len(banned) == vocab_size:
            raise InvalidRequest("logit_bias", "must leave at least one token", f"all {vocab_size} banned")
        if self.min_tokens and len(banned | self.stop_token_ids) == vocab_size:
            raise InvalidRequest("min_tokens", "must be 0 if any token ends the output", self.min_tokens)
        if len(self.grammar) > MAX_GRAMMAR:
            raise InvalidRequest("grammar", f"must be at most {MAX_GRAMMAR} characters", len(self.grammar))
        for token in self.stop_token_ids:
            _require(0 <= token < vocab_size, "stop_token_ids", token, f"a token id below {vocab_size}")


UNLIMITED = 2**31 - 1  # max_tokens of an output that may fill the context: no context is as long


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
                raise InvalidRequest(f"stop[{index}]", f"must be at most {MAX_STOP_LENGTH} characters", len(text))


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
