"""What goes in at the front door and what comes out, as plain values: requests and the events of a stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from bough.protocol.messages import RoundTimings, WorkerInfo
from bough.protocol.sampling_params import PositionLogprobs
from bough.trees.tree import Tree
from bough.trees.tree_plan import Growth, Guess, Scheme


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation."""

    role: str  # "system", "user", "assistant"
    content: str


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Plain text to continue."""

    text: str


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation to answer."""

    messages: tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Tokens to continue."""

    token_ids: tuple[int, ...]


Prompt = TextPrompt | ChatPrompt | TokenPrompt


@dataclass(frozen=True, slots=True)
class Speculation:
    """How to speculate; None leaves a choice to the planner. It never changes the output.

    But for a scheme other than Scheme.TARGET, which changes it as another seed would.
    """

    disabled: bool = False
    budget: int | None = None
    width: int | None = None
    depth: int | None = None
    growth: Growth | None = None
    scheme: Scheme = Scheme.TARGET
    guess: Guess = Guess.SAMPLE
    lookup: int | None = None  # most nodes of branches from the session's own text; 0 is none


@dataclass(frozen=True, slots=True)
class Resume:
    """How far the stream of a request came before it broke."""

    num_tokens: int  # output tokens that the client has seen
    token_ids: tuple[int, ...] = ()  # these, where it has kept them


@dataclass(frozen=True, slots=True)
class GenerateOptions:
    """Everything about a request but its prompt."""

    request_id: str = ""
    session_id: str = ""
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    max_tokens: int = 256
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    speculation: Speculation = Speculation()
    continues: bool = False  # the prompt comes after all that the session holds
    resume: Resume | None = None
    model: str = ""  # its name; empty is the session's, or else the only one that is served
    cache_salt: str = ""  # prefixes are shared with requests that have the same one


@dataclass(frozen=True, slots=True)
class Started:
    """The request was accepted."""

    request_id: str
    prompt_tokens: int
    seed: int
    model_name: str
    resumed_tokens: int = 0  # output tokens that came before this stream


class VerifiedTree(NamedTuple):
    """What the target has looked at in a round, and what it kept."""

    tree: Tree
    accepted_nodes: Sequence[int]  # of the tree, from the root down, the root left out


@dataclass(frozen=True, slots=True)
class Tokens:
    """The outcome of one round; the lists have one entry for each token.

    Without a tree (`num_nodes` 0): what had been generated before the request was resumed, and was not seen.
    """

    token_ids: tuple[int, ...]
    drafted: tuple[bool, ...]  # whether the draft had guessed it; the others are bonus tokens
    texts: tuple[str, ...]  # text that became certain with it
    logprobs: tuple[PositionLogprobs, ...]  # empty where not asked for
    num_nodes: int  # of the verified tree
    tree_depth: int
    timings: RoundTimings
    num_lookup: int = 0  # of the drafted tokens the last so many, which only the session's own text had suggested
    verified: VerifiedTree | None = field(default=None, compare=False, repr=False)  # known where the round was run

    @property
    def text(self) -> str:
        """All of the round's text."""
        return "".join(self.texts)


@dataclass(frozen=True, slots=True)
class Usage:
    """Sizes of a request."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class SpeculationMetrics:
    """How speculation went."""

    num_rounds: int
    num_draft_tokens: int  # nodes sent to the target, roots excluded
    num_accepted_tokens: int
    tokens_per_round: float
    acceptance_histogram: tuple[int, ...]  # [k]: rounds that accepted k draft tokens
    num_degraded_rounds: int  # without guesses of a draft worker because none answered
    num_lookup_tokens: int = 0  # accepted ones that only the session's own text had suggested


@dataclass(frozen=True, slots=True)
class Finished:
    """The request has ended."""

    finish_reason: str  # "stop", "length" or "abort"
    stop_reason: str  # the stop text or token id that was hit
    text: str  # what was still held back
    usage: Usage
    speculation: SpeculationMetrics
    timings: RoundTimings  # sums over all rounds
    warnings: tuple[str, ...]
    num_failovers: int = 0  # times that another target took over


Event = Started | Tokens | Finished


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A model that is served."""

    model_name: str
    model_description: str
    model_fingerprint: str
    tokenizer_fingerprint: str
    vocab_size: int
    max_context: int  # tokens of a prompt with its output, at the target that takes most
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """A worker as the orchestrator sees it."""

    address: str
    info: WorkerInfo
    problem: str  # empty where it is in use


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """The orchestrator and its workers."""

    workers: tuple[WorkerStatus, ...]
    index_problem: str
    index_url: str
    protocol_version: int
    bough_version: str
    is_draftless: bool = False  # no draft worker is used, and none is missed
    metrics_url: str = ""  # of the orchestrator's own; empty where it serves none
    http_url: str = ""  # where OpenAI's clients are served; empty for nowhere


@dataclass(frozen=True, slots=True)
class Loads:
    """What is running now."""

    num_requests_running: int
    num_requests_waiting: int  # for a place among those, or for a KV slot
    num_requests_total: int
    num_tokens_total: int
    max_requests_running: int = 0
    max_requests_waiting: int = 0
    wait_seconds: float = 0.0  # that one more request would wait for its place
    is_draining: bool = False  # nothing new is taken
