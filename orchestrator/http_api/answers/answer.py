"""From events to JSON: the common parts of all answers, and of all completions.

These are ids, usage, log-probabilities and speculation metrics; for answers to conversations also reasoning, content
and tool calls, which are parsed from the text.
"""

from __future__ import annotations

import hashlib
import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple

import numpy as np

from bough.protocol.generation import (
    Channels,
    Event,
    Finished,
    PromptLogprobs,
    SpeculationMetrics,
    Started,
    Tokens,
    ToolChoice,
    Tools,
)
from bough.protocol.sampling_params import PositionLogprobs, TokenLogprob
from orchestrator.http_api.fields.errors import ApiError, Json
from orchestrator.http_api.fields.generation import StreamOptions
from orchestrator.reasoning.parser import HarmonyParser, ReasoningParser
from orchestrator.tools.call_parser import ArgumentsText, CallBegun, ContentText, Piece
from orchestrator.tools.tool_format import ToolFormat

NANO = 1e-9
MINUS_INFINITY = -9999.0  # JSON has no infinity

TokenBytes = Callable[[int], bytes]  # bytes of a token, possibly part of a character
Spell = Callable[[str], TokenBytes]  # takes a model's name
Formats = Callable[[str], ToolFormat]  # takes a model's name


class ReasoningText(NamedTuple):
    """A piece of reasoning."""

    text: str


@dataclass(slots=True)
class FunctionCall:
    """A call of a function, as far as it was generated."""

    call_id: str
    name: str
    arguments: str = ""


class AnswerContent:
    """The content of one choice so far. The text after the reasoning is searched for calls."""

    def __init__(self, choice_id: str, started: Started, tools: Tools | None, formats: Formats) -> None:
        """Ids of calls are made from `choice_id`. A request that was aborted before its model was known has none."""
        self.reasoning: list[str] = []
        self.texts: list[str] = []  # text outside reasoning and calls
        self.calls: list[FunctionCall] = []
        self._choice_id = choice_id
        self._num_before_content = 0  # tokens
        may_call = tools is not None and tools.choice is not ToolChoice.NONE and bool(started.model_name)
        self._reasoning_parser: ReasoningParser | HarmonyParser | None = None
        if isinstance(started.reasoning, Channels):
            self._reasoning_parser = HarmonyParser(started.reasoning, has_calls=may_call)
        elif started.reasoning is not None:
            self._reasoning_parser = ReasoningParser(started.reasoning)
        self._format = formats(started.model_name) if may_call else None
        self._parser = self._format.parser(tools) if self._format is not None and tools is not None else None

    @property
    def num_reasoning(self) -> int | None:
        """Tokens of the reasoning, marks included; None if the model marks none."""
        return None if self._reasoning_parser is None else self._num_before_content if self.has_reasoning else 0

    @property
    def has_reasoning(self) -> bool:
        """Whether there is reasoning, even if it is empty."""
        return self._reasoning_parser is not None and self._reasoning_parser.has_reasoning

    @property
    def has_called(self) -> bool:
        """Whether there are calls, and the last one is complete."""
        return bool(self.calls) and self._parser is not None and not self._parser.is_in_call

    def pieces(self, texts: Sequence[str], *, is_end: bool = False) -> Iterator[ReasoningText | Piece]:
        """The new pieces in the texts of further tokens, or in the last text; each is recorded when it is yielded."""
        # In messages reasoning may also come after content: the order within a round matters.
        each = [(text,) for text in texts] if isinstance(self._reasoning_parser, HarmonyParser) else [texts]
        return self._noted([piece for group in each for piece in self._found(group, is_end=is_end)])

    def _found(self, texts: Sequence[str], *, is_end: bool) -> list[ReasoningText | Piece]:
        reasoning, text = self._parted(texts, is_end=is_end)
        pieces: Iterable[Piece] = [ContentText(text)] if text else []
        if self._parser is not None:
            pieces = (*self._parser.push(text), *(self._parser.finish() if is_end else ()))
        return [*([ReasoningText(reasoning)] if reasoning else []), *pieces]

    def _parted(self, texts: Sequence[str], *, is_end: bool) -> tuple[str, str]:
        if self._reasoning_parser is None:
            return "", "".join(texts)
        parts = []
        for text in texts:
            self._num_before_content += self._reasoning_parser.is_before_content and not is_end
            parts.append(self._reasoning_parser.push(text))
        parts += [self._reasoning_parser.finish()] if is_end else []
        return "".join(part.reasoning for part in parts), "".join(part.content for part in parts)

    def _noted(self, pieces: Iterable[ReasoningText | Piece]) -> Iterator[ReasoningText | Piece]:
        for piece in pieces:
            match piece:
                case ReasoningText(text):
                    self.reasoning.append(text)
                case ContentText(text):
                    self.texts.append(text)
                case CallBegun(name):
                    self.calls.append(FunctionCall(self._call_id(), name))
                case ArgumentsText(text):
                    self.calls[-1].arguments += text
            yield piece

    def _call_id(self) -> str:
        assert self._format is not None
        digest = hashlib.blake2b(f"{self._choice_id}/{len(self.calls)}".encode()).hexdigest()
        return self._format.id_prefix + digest[: self._format.id_length]


@dataclass(frozen=True, slots=True)
class Head:
    """Fields of every chunk of an answer, and how it is sent."""

    answer_id: str
    created: int  # seconds since 1970
    is_stream: bool = False  # sent chunk by chunk instead of as one object at the end


@dataclass(slots=True)
class Choice:
    """State of one choice of an answer."""

    prompt_tokens: int = 0
    num_tokens: int = 0
    finished: Finished | None = None

    def observe(self, event: Event) -> None:
        match event:
            case Started():
                self.prompt_tokens = event.prompt_tokens
            case Tokens():
                self.num_tokens += len(event.token_ids)
            case Finished():
                self.finished = event
                self.num_tokens = event.usage.completion_tokens

    @property
    def finish_reason(self) -> str | None:
        """The finish reason; None before the end."""
        return self.finished.finish_reason if self.finished else None

    @property
    def stop_reason(self) -> str | int | None:
        """The stop text or, as a number, the token id that ended it."""
        if self.finished is None:
            return None
        token_id = self.finished.stop_token_id
        return self.finished.stop_reason or None if token_id is None else token_id


class Answer(ABC):
    """An answer in progress. Events go in; chunks of a stream come out, or the whole at the end.

    A chunk that has a `type` is an event of that name.
    """

    stream_end = b"data: [DONE]\n\n"

    def __init__(self, head: Head, num_choices: int, choices_per_prompt: int, spell: Spell | None) -> None:
        """`spell` is given if the answer has tokens' texts, in log-probabilities or in rounds."""
        self.head = head
        self.model = ""  # known once a request has started
        self.num_entries = 0  # log-probabilities so far: the final object may have megabytes
        self._token_bytes: TokenBytes | None = None
        self._spell = spell
        self.choices = [Choice() for _ in range(num_choices)]
        self.contents: dict[int, AnswerContent] = {}  # by choice, in answer to a conversation
        self._choices_per_prompt = choices_per_prompt

    def chunks(self, index: int, event: Event) -> list[Json]:
        """The chunks that an event of one choice adds to the stream."""
        self.choices[index].observe(event)
        if isinstance(event, Tokens | PromptLogprobs):
            num_told = self._choices_per_prompt if isinstance(event, PromptLogprobs) else 1  # by each choice
            self.num_entries += num_told * sum(1 + len(at.top) for at in event.logprobs)
        if isinstance(event, Started) and event.model_name:  # a choice that was aborted before its start has none
            self.model = event.model_name
            self._token_bytes = self._spell(event.model_name) if self._spell else None
        return self._added(index, event)

    @abstractmethod
    def last_chunks(self) -> Iterator[Json]:
        """The chunks after those of all choices."""

    def failed(self, error: ApiError) -> Iterator[Json]:
        """The last chunks of a started stream that ends with an error."""
        yield error.body()

    @abstractmethod
    def whole(self) -> Json:
        """The answer as one object, once all choices are finished."""

    @abstractmethod
    def _added(self, index: int, event: Event) -> list[Json]:
        """The chunks for an event that has been observed."""

    def _counts(self) -> tuple[int, int | None, int]:
        """Prompt tokens, each prompt counted once; cached ones of these, None while unknown; generated tokens."""
        firsts = self.choices[:: self._choices_per_prompt]
        ends = [choice.finished for choice in firsts if choice.finished]
        cached = sum(end.usage.cached_tokens for end in ends) if len(ends) == len(firsts) else None
        prompt = sum(choice.prompt_tokens for choice in firsts)
        return prompt, cached, sum(choice.num_tokens for choice in self.choices)

    def _figures(self) -> Json:
        """Fields that are sent once, at the end; each warning once for all choices."""
        ends = [choice.finished for choice in self.choices if choice.finished]
        metrics = {"speculative_decoding": speculative_decoding(end.speculation for end in ends)}
        warnings = list(dict.fromkeys(text for end in ends for text in end.warnings))
        return {"usage": self._usage(), "metrics": metrics} | ({"warnings": warnings} if warnings else {})

    @abstractmethod
    def _usage(self) -> Json:
        """Token counts so far, in the API's form."""


class Completion(Answer):
    """An answer of choices, for chats and texts."""

    whole_object: str
    chunk_object: str

    def __init__(
        self, head: Head, num_choices: int, choices_per_prompt: int, stream_options: StreamOptions, spell: Spell | None
    ) -> None:
        super().__init__(head, num_choices, choices_per_prompt, spell)
        self.stream_options = stream_options

    def last_chunks(self) -> Iterator[Json]:
        """Usage, if requested."""
        if self.stream_options.include_usage:
            yield self._frame(self.chunk_object) | {"choices": []} | self._figures()

    def whole(self) -> Json:
        choices = [self._choice(index) for index in range(len(self.choices))]
        return self._frame(self.whole_object) | {"choices": choices} | self._figures()

    def _added(self, index: int, event: Event) -> list[Json]:
        chunks = [self._chunk([one]) for one in self._entries(index, event)]
        if self.stream_options.include_rounds and isinstance(event, Tokens) and event.num_nodes > 0:
            chunks = chunks or [self._chunk([])]  # a round may end within a character
            chunks[0]["metrics"] = {"round": round_of(event, self._token_bytes)}
        return chunks

    @abstractmethod
    def _entries(self, index: int, event: Event) -> Iterator[Json]:
        """Entries of a chunk's `choices` for an event."""

    @abstractmethod
    def _choice(self, index: int) -> Json:
        """A finished choice as an entry of `choices` of the whole."""

    def _ending(self, index: int) -> Json:
        """Why a choice ended."""
        choice = self.choices[index]
        return {"finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}

    def _frame(self, name: str) -> Json:
        head = self.head
        return {"id": head.answer_id, "object": name, "created": head.created, "model": self.model}

    def _chunk(self, choices: Sequence[Json]) -> Json:
        chunk: Json = self._frame(self.chunk_object) | {"choices": choices}
        if self.stream_options.continuous_usage_stats:
            chunk["usage"] = self._usage()
        elif self.stream_options.include_usage:
            chunk["usage"] = None
        return chunk

    def _usage(self) -> Json:
        prompt, cached, completion = self._counts()
        usage: Json = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
        reasoning = [content.num_reasoning for content in self.contents.values() if content.num_reasoning is not None]
        if reasoning:
            usage["completion_tokens_details"] = {"reasoning_tokens": sum(reasoning)}
        return usage if cached is None else usage | {"prompt_tokens_details": {"cached_tokens": cached}}


def round_of(event: Tokens, token_bytes: TokenBytes | None) -> Json:
    """One round, for the page at /ui and other observers: its tree, its accepted nodes, and its times.

    `parents`, `tokens` and `probabilities` (the draft's, given the path) are of the verified nodes; the root is the
    last token before the round, and its parent is -1. `accepted` are node numbers from the root down.
    """
    timings, verified = event.timings, event.verified
    tree = verified.tree if verified else None
    compute_ns = max(0, timings.target_ns - timings.queue_ns - timings.wait_ns)
    parts = ("total", "draft", "network", "queue", "wait", "other")
    return {
        "nodes": event.num_nodes,
        "depth": event.tree_depth,
        "parents": tree.parents.tolist() if tree else [],
        "tokens": [token_text(token_bytes(token)) for token in tree.tokens.tolist()] if tree and token_bytes else [],
        "probabilities": [round(p, 4) for p in np.exp(tree.log_probs).tolist()] if tree else [],
        "accepted": list(verified.accepted_nodes) if verified else [],
        "texts": list(event.texts),
        "drafted": list(event.drafted),
        "seconds": {name: getattr(timings, f"{name}_ns") * NANO for name in parts} | {"compute": compute_ns * NANO},
    }


def speculative_decoding(runs: Iterable[SpeculationMetrics]) -> Json:
    """Speculation metrics under the names that benchmarks read; roots are not draft tokens."""
    runs = tuple(runs)
    num_steps = sum(run.num_rounds for run in runs)
    num_drafted = sum(run.num_draft_tokens for run in runs)
    num_accepted = sum(run.num_accepted_tokens for run in runs)
    histograms = (run.acceptance_histogram for run in runs)
    return {
        "mean_acceptance_length": 1 + num_accepted / num_steps if num_steps else 0.0,
        "draft_acceptance_rate": num_accepted / num_drafted if num_drafted else 0.0,
        "acceptance_histogram": [sum(counts) for counts in zip_longest(*histograms, fillvalue=0)],
        "num_accepted_draft_tokens": num_accepted,
        "num_draft_tokens": num_drafted,
        "num_spec_steps": num_steps,
    }


def chat_logprobs(positions: Sequence[PositionLogprobs], token_bytes: TokenBytes) -> list[Json]:
    """One entry for each token, as in `choices[].logprobs.content` of a chat."""

    def entry(token: TokenLogprob) -> Json:
        data = token_bytes(token.token_id)
        return {"token": token_text(data), "logprob": finite(token.logprob), "bytes": list(data)}

    return [entry(at.token) | {"top_logprobs": [entry(top) for top in at.top]} for at in positions]


class TokensSpelled(NamedTuple):
    """Four lists with an entry for each token, as in `choices[].logprobs` of a completion."""

    tokens: list[str]
    token_logprobs: list[float | None]  # None for a prompt's first token
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]  # of the token's text in the whole text, in characters

    def extend(self, more: TokensSpelled) -> None:
        self.tokens.extend(more.tokens)
        self.token_logprobs.extend(more.token_logprobs)
        self.top_logprobs.extend(more.top_logprobs)
        self.text_offset.extend(more.text_offset)


def completion_logprobs(
    positions: Sequence[PositionLogprobs], begins: Sequence[int], token_bytes: TokenBytes
) -> TokensSpelled:
    """Entries of tokens whose texts begin at these characters of the whole text."""
    tokens = [token_text(token_bytes(at.token.token_id)) for at in positions]
    likeliest = [_by_text(at, token_bytes) for at in positions]
    return TokensSpelled(tokens, [finite(at.token.logprob) for at in positions], [*likeliest], [*begins])


def prompt_logprobs(event: PromptLogprobs, token_bytes: TokenBytes) -> TokensSpelled:
    """Entries of a prompt's tokens; its first has no log-probability."""
    first = len(event.token_ids) - len(event.logprobs)
    tokens = [token_text(token_bytes(token_id)) for token_id in event.token_ids[:first]]
    spelled = TokensSpelled(tokens, [None] * first, [None] * first, [*event.begins[:first]])
    spelled.extend(completion_logprobs(event.logprobs, event.begins[first:], token_bytes))
    return spelled


def _by_text(at: PositionLogprobs, token_bytes: TokenBytes) -> dict[str, float]:
    """The likeliest tokens and the sampled one. Of tokens with equal text the likeliest counts."""
    by_text: dict[str, float] = {}
    for token in (*at.top, at.token):
        by_text.setdefault(token_text(token_bytes(token.token_id)), finite(token.logprob))
    return by_text


def finite(logprob: float) -> float:
    """Replace infinity by a number for JSON."""
    return logprob if math.isfinite(logprob) else MINUS_INFINITY


def token_text(data: bytes) -> str:
    """The text of a token's bytes; incomplete characters are replaced."""
    return sys.intern(data.decode(errors="replace"))  # one object for the many entries of a token
