"""Generation requests, the events of their streams, and server information, as plain values."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, NamedTuple

from bough.protocol.cost_curve import CostCurve
from bough.protocol.decision import RoundTimings
from bough.protocol.sampling_params import PositionLogprobs, Sampling
from bough.trees.tree_plan import Growth, Scheme

if TYPE_CHECKING:  # clients have no numpy
    from bough.trees.tree import Tree

PROTOCOL_VERSION = 1


@dataclass(frozen=True, slots=True)
class StageStatus:
    """A stage of a target: a further machine, which holds consecutive layers. Times are those of the last sweep."""

    address: str
    first_layer: int
    end_layer: int  # the layer after its last one
    memory_bytes: int  # that its layers and their keys and values take, as it has reported last
    wait_ns: int = 0  # waiting for weights
    compute_ns: int = 0
    queue_ns: int = 0  # waiting for the sweep before it


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """A worker's model, limits and load."""

    kind: str  # "draft" or "target"
    worker_id: str
    model_name: str
    model_description: str
    model_fingerprint: str
    tokenizer_fingerprint: str
    vocab_size: int
    max_context: int  # tokens of a session, the root included
    max_nodes: int
    max_sessions: int  # sessions of max_context tokens that fit; more if shorter
    num_sessions: int = 0
    kv_bytes: int = 0  # capacity of the KV cache
    kv_used_bytes: int = 0  # part of kv_bytes that cannot be evicted now
    num_waiting: int = 0  # calls that wait for a sweep or a draft step
    link_bytes_per_pass: int = 0
    notes: tuple[str, ...] = ()
    protocol_version: int = PROTOCOL_VERSION
    bough_version: str = ""
    arithmetic: str = ""  # of a target: kernels, data types and versions on which its exact bits depend
    cost: CostCurve | None = None  # seconds of a sweep, or of a draft step, by its rows
    num_running: int = 0  # calls in the current sweep; a draft counts all calls as waiting
    num_passes: int = 0  # sweeps or draft steps completed since the start
    weights_hash: str = ""  # of a target: hash over all weight bytes; empty until computed
    context_limit: str = (
        ""  # the flag that keeps max_context below the model's own limit, and that limit; empty if none does
    )
    stages: tuple[StageStatus, ...] = ()  # of a target that spans machines, in order
    stage_network_ns: int = 0  # of a target: time of the last sweep between its machines

    @property
    def model_identity(self) -> str:
        """Equal for targets of one model: a session may move among them, though perhaps not bit for bit."""
        return _digest(self.model_fingerprint, self.model_description, self.tokenizer_fingerprint)

    def contradiction(self, other: WorkerInfo) -> str:
        """Why sessions must not move between two targets of the same model identity; empty if nothing forbids it."""
        if {self.kind, other.kind} != {"target"} or self.model_identity != other.model_identity:
            return ""
        if not weights_differ(self.weights_hash, other.weights_hash):
            return ""
        first, second = sorted((self, other), key=lambda info: info.worker_id)
        return (
            f"{first.worker_id} and {second.worker_id} claim the same model but have different weights: "
            f"{first.weights_hash} and {second.weights_hash}"
        )

    @property
    def identity(self) -> str:
        """Equal for targets that produce equal tokens, bit for bit; short enough to be recorded."""
        return _digest(self.model_fingerprint, self.model_description, self.tokenizer_fingerprint, self.arithmetic)


def weights_differ(first: str, second: str) -> bool:
    """Whether both hashes are known and differ."""
    return bool(first and second) and first != second


def _digest(*parts: str) -> str:
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=16).hexdigest()


class Beginning(Enum):
    """Where an answer begins relative to reasoning."""

    INSIDE = auto()  # in reasoning that the prompt has opened
    BEFORE = auto()  # before reasoning, which the model may open or not
    AFTER = auto()  # after reasoning that the prompt has closed: there is none


@dataclass(frozen=True, slots=True)
class ReasoningMarks:
    """The marks around the reasoning of one answer."""

    begin: str
    end: str
    beginning: Beginning


@dataclass(frozen=True, slots=True)
class Channels:
    """An answer of messages, whose headers say which are reasoning (OpenAI's harmony format)."""

    header: str  # the part of the first message that is in the prompt


Reasoning = ReasoningMarks | Channels  # how an answer marks its reasoning


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a function that an assistant made."""

    call_id: str
    name: str
    arguments: str  # a JSON object, as text


@dataclass(frozen=True, slots=True)
class Function:
    """A function that the model may call."""

    name: str
    parameters: str  # JSON Schema of its arguments, as text
    description: str | None = None
    is_strict: bool = False  # its arguments follow the schema even if the model decides whether to call it


class ToolChoice(Enum):
    """Whether the model calls functions."""

    NONE = "none"
    AUTO = "auto"
    REQUIRED = "required"


@dataclass(frozen=True, slots=True)
class Tools:
    """The functions that the model may call, and whether it must."""

    functions: tuple[Function, ...]
    choice: ToolChoice = ToolChoice.AUTO
    allowed: tuple[str, ...] = ()  # names of the only functions that may be called; empty allows all
    allows_several: bool = True  # calls in one answer

    @property
    def must_call(self) -> bool:
        """Whether the answer must be one or several calls."""
        return self.choice is ToolChoice.REQUIRED


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation."""

    role: str  # "system", "user", "assistant"; "tool" over HTTP
    content: str
    tool_calls: tuple[ToolCall, ...] = ()  # of an assistant; over HTTP only
    tool_call_id: str = ""  # the call that a message of role "tool" answers
    reasoning: str = ""  # an assistant's reasoning before its content


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Plain text to continue."""

    text: str


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation to answer."""

    messages: tuple[Message, ...]
    tools: Tools | None = None  # over HTTP only
    chat_template_kwargs: str = ""  # variables of the chat template, as the text of a JSON object; empty is none


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Tokens to continue."""

    token_ids: tuple[int, ...]


Prompt = TextPrompt | ChatPrompt | TokenPrompt


@dataclass(frozen=True, slots=True)
class Speculation:
    """Speculation settings of a request; None leaves the choice to the planner.

    They never change the output, except that a scheme other than Scheme.TARGET changes it like another seed.
    """

    disabled: bool = False
    budget: int | None = None
    width: int | None = None
    depth: int | None = None
    growth: Growth | None = None
    scheme: Scheme = Scheme.TARGET
    lookup: int | None = None  # most nodes from prompt lookup; 0 is none


@dataclass(frozen=True, slots=True)
class Constraint:
    """A constraint on the whole output: exactly one of the first four."""

    json_schema: str | None = None  # a JSON Schema, as JSON text
    regex: str | None = None  # a regular expression that matches all of it
    choices: tuple[str, ...] = ()  # the output is one of these
    lark: str | None = None  # a grammar in llguidance's dialect of Lark, or in EBNF as llama.cpp reads it
    after_reasoning: bool = False  # the reasoning at the beginning of an answer is exempt


@dataclass(frozen=True, slots=True)
class Resume:
    """The progress of a stream that broke, from which the client resumes it."""

    num_tokens: int  # output tokens that the client has received
    token_ids: tuple[int, ...] = ()  # those tokens, if the client kept them


@dataclass(frozen=True, slots=True)
class GenerateOptions(Sampling):
    """All options of a request except its prompt; those of sampling are inherited."""

    request_id: str = ""
    session_id: str = ""
    max_tokens: int = 256
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    include_stop: bool = False  # in the text: the stop text or token that ends it
    speculation: Speculation = Speculation()
    continues: bool = False  # append the prompt to the session's tokens
    resume: Resume | None = None
    model: str = ""  # its name; empty is the session's model, or else the only one served
    cache_salt: str = ""  # cached prefixes are shared only among requests with the same salt
    constraint: Constraint | None = None  # on the output
    prompt_logprobs: int | None = None  # alternatives to report for each token of the prompt; None reports nothing


@dataclass(frozen=True, slots=True)
class Started:
    """The request was accepted."""

    request_id: str
    prompt_tokens: int
    seed: int
    model_name: str
    resumed_tokens: int = 0  # output tokens generated before this stream
    reasoning: Reasoning | None = field(default=None, compare=False, repr=False)  # only in the orchestrator


class VerifiedTree(NamedTuple):
    """The tree that the target verified in a round, and the accepted path."""

    tree: Tree
    accepted_nodes: Sequence[int]  # from the root (excluded) down


@dataclass(frozen=True, slots=True)
class Tokens:
    """The outcome of one round; sequences have one entry for each token."""

    token_ids: tuple[int, ...]
    drafted: tuple[bool, ...]  # true for accepted draft tokens, false for bonus tokens
    texts: tuple[str, ...]  # text completed by each token
    logprobs: tuple[PositionLogprobs, ...]  # empty if not requested
    num_nodes: int  # of the verified tree; 0 for tokens that a resumed request generated earlier, unseen by its client
    tree_depth: int
    timings: RoundTimings
    num_lookup: int = 0  # how many of the last drafted tokens came from prompt lookup alone
    # Only in the orchestrator: the verified tree, and where each token's text begins in the whole, in characters.
    verified: VerifiedTree | None = field(default=None, compare=False, repr=False)
    begins: tuple[int, ...] = field(default=(), compare=False, repr=False)

    @property
    def text(self) -> str:
        """The round's text."""
        return "".join(self.texts)


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probabilities of a part of the prompt, in order; the first token, which follows nothing, has none."""

    token_ids: tuple[int, ...]
    logprobs: tuple[PositionLogprobs, ...]
    begins: tuple[int, ...] = field(default=(), compare=False, repr=False)  # as of `Tokens`, in the prompt's text


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a request."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class SpeculationMetrics:
    """Speculation statistics of a request."""

    num_rounds: int
    num_draft_tokens: int  # nodes sent to the target, roots excluded
    num_accepted_tokens: int
    tokens_per_round: float
    acceptance_histogram: tuple[int, ...]  # [k]: rounds that accepted k draft tokens
    num_degraded_rounds: int  # rounds without a drafted tree because no draft worker answered
    num_lookup_tokens: int = 0  # accepted tokens that came from prompt lookup alone


@dataclass(frozen=True, slots=True)
class Finished:
    """The request has ended."""

    finish_reason: str  # "stop", "length" or "abort"
    stop_reason: str  # the stop text or token id that was matched
    text: str  # remaining text, not yet sent
    usage: Usage
    speculation: SpeculationMetrics
    timings: RoundTimings  # sums over all rounds
    warnings: tuple[str, ...]
    num_failovers: int = 0  # moves to another target
    stop_token_id: int | None = None  # that was matched; None for a stop text or a limit


Event = Started | PromptLogprobs | Tokens | Finished


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A served model."""

    model_name: str
    model_description: str
    model_fingerprint: str
    tokenizer_fingerprint: str
    vocab_size: int
    max_context: int  # most tokens of prompt and output, over all targets
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """A worker as the orchestrator sees it."""

    address: str
    info: WorkerInfo
    problem: str  # why it is not used; empty if it is


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """The orchestrator and its workers."""

    workers: tuple[WorkerStatus, ...]
    index_problem: str
    index_url: str
    protocol_version: int
    bough_version: str
    is_draftless: bool = False  # configured to run without draft workers
    metrics_url: str = ""  # of the orchestrator's metrics; empty if not served
    http_url: str = ""  # of the OpenAI-compatible API; empty if not served
    unreached: tuple[str, ...] = ()  # registered workers that have not reported what they serve, and why


@dataclass(frozen=True, slots=True)
class Loads:
    """The current load of an orchestrator."""

    num_requests_running: int
    num_requests_waiting: int  # for admission, or for a KV slot
    num_requests_total: int
    num_tokens_total: int
    max_requests_running: int = 0
    max_requests_waiting: int = 0
    wait_seconds: float = 0.0  # estimated wait of a new request for admission
