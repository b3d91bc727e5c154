from bough.pb import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ChatMessage(_message.Message):
    __slots__ = ("role", "content", "reasoning")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    REASONING_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    reasoning: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ..., reasoning: _Optional[str] = ...) -> None: ...

class ChatMessages(_message.Message):
    __slots__ = ("messages", "chat_template_kwargs")
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    CHAT_TEMPLATE_KWARGS_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    chat_template_kwargs: str
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ..., chat_template_kwargs: _Optional[str] = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Speculation(_message.Message):
    __slots__ = ("disabled", "budget", "width", "depth", "growth", "scheme", "lookup")
    DISABLED_FIELD_NUMBER: _ClassVar[int]
    BUDGET_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    DEPTH_FIELD_NUMBER: _ClassVar[int]
    GROWTH_FIELD_NUMBER: _ClassVar[int]
    SCHEME_FIELD_NUMBER: _ClassVar[int]
    LOOKUP_FIELD_NUMBER: _ClassVar[int]
    disabled: bool
    budget: int
    width: int
    depth: int
    growth: _common_pb2.Growth
    scheme: _common_pb2.VerificationScheme
    lookup: int
    def __init__(self, disabled: _Optional[bool] = ..., budget: _Optional[int] = ..., width: _Optional[int] = ..., depth: _Optional[int] = ..., growth: _Optional[_Union[_common_pb2.Growth, _Mapping]] = ..., scheme: _Optional[_Union[_common_pb2.VerificationScheme, str]] = ..., lookup: _Optional[int] = ...) -> None: ...

class Constraint(_message.Message):
    __slots__ = ("json_schema", "regex", "choices", "lark", "after_reasoning")
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    LARK_FIELD_NUMBER: _ClassVar[int]
    AFTER_REASONING_FIELD_NUMBER: _ClassVar[int]
    json_schema: str
    regex: str
    choices: _containers.RepeatedScalarFieldContainer[str]
    lark: str
    after_reasoning: bool
    def __init__(self, json_schema: _Optional[str] = ..., regex: _Optional[str] = ..., choices: _Optional[_Iterable[str]] = ..., lark: _Optional[str] = ..., after_reasoning: _Optional[bool] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("text", "chat", "token_ids", "request_id", "session_id", "sampling", "max_tokens", "stop", "ignore_eos", "speculation", "continues", "resume", "model", "cache_salt", "constraint", "include_stop", "prompt_logprobs")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    CONTINUES_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    CONSTRAINT_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_STOP_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    text: str
    chat: ChatMessages
    token_ids: TokenIds
    request_id: str
    session_id: str
    sampling: _common_pb2.SamplingParams
    max_tokens: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    ignore_eos: bool
    speculation: Speculation
    continues: bool
    resume: Resume
    model: str
    cache_salt: str
    constraint: Constraint
    include_stop: bool
    prompt_logprobs: int
    def __init__(self, text: _Optional[str] = ..., chat: _Optional[_Union[ChatMessages, _Mapping]] = ..., token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., request_id: _Optional[str] = ..., session_id: _Optional[str] = ..., sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., max_tokens: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., ignore_eos: _Optional[bool] = ..., speculation: _Optional[_Union[Speculation, _Mapping]] = ..., continues: _Optional[bool] = ..., resume: _Optional[_Union[Resume, _Mapping]] = ..., model: _Optional[str] = ..., cache_salt: _Optional[str] = ..., constraint: _Optional[_Union[Constraint, _Mapping]] = ..., include_stop: _Optional[bool] = ..., prompt_logprobs: _Optional[int] = ...) -> None: ...

class Resume(_message.Message):
    __slots__ = ("num_tokens", "token_ids")
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    num_tokens: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, num_tokens: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Started(_message.Message):
    __slots__ = ("request_id", "prompt_tokens", "seed", "model_name", "resumed_tokens")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    RESUMED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    prompt_tokens: int
    seed: int
    model_name: str
    resumed_tokens: int
    def __init__(self, request_id: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., seed: _Optional[int] = ..., model_name: _Optional[str] = ..., resumed_tokens: _Optional[int] = ...) -> None: ...

class RoundTimings(_message.Message):
    __slots__ = ("total_ns", "draft_ns", "network_ns", "target_ns", "queue_ns", "wait_ns", "compute_ns", "link_ns", "link_bytes", "link_ideal_ns")
    TOTAL_NS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_NS_FIELD_NUMBER: _ClassVar[int]
    NETWORK_NS_FIELD_NUMBER: _ClassVar[int]
    TARGET_NS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_NS_FIELD_NUMBER: _ClassVar[int]
    WAIT_NS_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_NS_FIELD_NUMBER: _ClassVar[int]
    LINK_NS_FIELD_NUMBER: _ClassVar[int]
    LINK_BYTES_FIELD_NUMBER: _ClassVar[int]
    LINK_IDEAL_NS_FIELD_NUMBER: _ClassVar[int]
    total_ns: int
    draft_ns: int
    network_ns: int
    target_ns: int
    queue_ns: int
    wait_ns: int
    compute_ns: int
    link_ns: int
    link_bytes: int
    link_ideal_ns: int
    def __init__(self, total_ns: _Optional[int] = ..., draft_ns: _Optional[int] = ..., network_ns: _Optional[int] = ..., target_ns: _Optional[int] = ..., queue_ns: _Optional[int] = ..., wait_ns: _Optional[int] = ..., compute_ns: _Optional[int] = ..., link_ns: _Optional[int] = ..., link_bytes: _Optional[int] = ..., link_ideal_ns: _Optional[int] = ...) -> None: ...

class PromptLogprobs(_message.Message):
    __slots__ = ("token_ids", "logprobs")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[_common_pb2.PositionLogprobs]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[_common_pb2.PositionLogprobs, _Mapping]]] = ...) -> None: ...

class Tokens(_message.Message):
    __slots__ = ("token_ids", "drafted", "texts", "logprobs", "num_nodes", "tree_depth", "timings", "num_lookup")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_FIELD_NUMBER: _ClassVar[int]
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    NUM_NODES_FIELD_NUMBER: _ClassVar[int]
    TREE_DEPTH_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    NUM_LOOKUP_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    drafted: _containers.RepeatedScalarFieldContainer[bool]
    texts: _containers.RepeatedScalarFieldContainer[str]
    logprobs: _containers.RepeatedCompositeFieldContainer[_common_pb2.PositionLogprobs]
    num_nodes: int
    tree_depth: int
    timings: RoundTimings
    num_lookup: int
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., drafted: _Optional[_Iterable[bool]] = ..., texts: _Optional[_Iterable[str]] = ..., logprobs: _Optional[_Iterable[_Union[_common_pb2.PositionLogprobs, _Mapping]]] = ..., num_nodes: _Optional[int] = ..., tree_depth: _Optional[int] = ..., timings: _Optional[_Union[RoundTimings, _Mapping]] = ..., num_lookup: _Optional[int] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prompt_tokens", "completion_tokens", "cached_tokens")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class SpeculationMetrics(_message.Message):
    __slots__ = ("num_rounds", "num_draft_tokens", "num_accepted_tokens", "tokens_per_round", "acceptance_histogram", "num_degraded_rounds", "num_lookup_tokens")
    NUM_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_ROUND_FIELD_NUMBER: _ClassVar[int]
    ACCEPTANCE_HISTOGRAM_FIELD_NUMBER: _ClassVar[int]
    NUM_DEGRADED_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    NUM_LOOKUP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    num_rounds: int
    num_draft_tokens: int
    num_accepted_tokens: int
    tokens_per_round: float
    acceptance_histogram: _containers.RepeatedScalarFieldContainer[int]
    num_degraded_rounds: int
    num_lookup_tokens: int
    def __init__(self, num_rounds: _Optional[int] = ..., num_draft_tokens: _Optional[int] = ..., num_accepted_tokens: _Optional[int] = ..., tokens_per_round: _Optional[float] = ..., acceptance_histogram: _Optional[_Iterable[int]] = ..., num_degraded_rounds: _Optional[int] = ..., num_lookup_tokens: _Optional[int] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("finish_reason", "stop_reason", "text", "usage", "speculation", "timings", "warnings", "num_failovers", "stop_token_id")
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_REASON_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    WARNINGS_FIELD_NUMBER: _ClassVar[int]
    NUM_FAILOVERS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    finish_reason: str
    stop_reason: str
    text: str
    usage: Usage
    speculation: SpeculationMetrics
    timings: RoundTimings
    warnings: _containers.RepeatedScalarFieldContainer[str]
    num_failovers: int
    stop_token_id: int
    def __init__(self, finish_reason: _Optional[str] = ..., stop_reason: _Optional[str] = ..., text: _Optional[str] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., speculation: _Optional[_Union[SpeculationMetrics, _Mapping]] = ..., timings: _Optional[_Union[RoundTimings, _Mapping]] = ..., warnings: _Optional[_Iterable[str]] = ..., num_failovers: _Optional[int] = ..., stop_token_id: _Optional[int] = ...) -> None: ...

class GenerateEvent(_message.Message):
    __slots__ = ("started", "tokens", "finished", "prompt_logprobs")
    STARTED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    started: Started
    tokens: Tokens
    finished: Finished
    prompt_logprobs: PromptLogprobs
    def __init__(self, started: _Optional[_Union[Started, _Mapping]] = ..., tokens: _Optional[_Union[Tokens, _Mapping]] = ..., finished: _Optional[_Union[Finished, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[PromptLogprobs, _Mapping]] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class AbortReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CloseSessionRequest(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    def __init__(self, session_id: _Optional[str] = ...) -> None: ...

class CloseSessionReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetModelInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ModelInfo(_message.Message):
    __slots__ = ("model_name", "model_description", "model_fingerprint", "tokenizer_fingerprint", "vocab_size", "max_context", "eos_token_ids", "models")
    MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    MODEL_DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    model_name: str
    model_description: str
    model_fingerprint: str
    tokenizer_fingerprint: str
    vocab_size: int
    max_context: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    models: _containers.RepeatedCompositeFieldContainer[ModelInfo]
    def __init__(self, model_name: _Optional[str] = ..., model_description: _Optional[str] = ..., model_fingerprint: _Optional[str] = ..., tokenizer_fingerprint: _Optional[str] = ..., vocab_size: _Optional[int] = ..., max_context: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., models: _Optional[_Iterable[_Union[ModelInfo, _Mapping]]] = ...) -> None: ...

class WorkerStatus(_message.Message):
    __slots__ = ("address", "info", "problem")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    INFO_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    address: str
    info: _common_pb2.WorkerInfo
    problem: str
    def __init__(self, address: _Optional[str] = ..., info: _Optional[_Union[_common_pb2.WorkerInfo, _Mapping]] = ..., problem: _Optional[str] = ...) -> None: ...

class ServerInfo(_message.Message):
    __slots__ = ("protocol_version", "bough_version", "workers", "index_problem", "index_url", "is_draftless", "metrics_url", "http_url", "unreached")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    BOUGH_VERSION_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    INDEX_PROBLEM_FIELD_NUMBER: _ClassVar[int]
    INDEX_URL_FIELD_NUMBER: _ClassVar[int]
    IS_DRAFTLESS_FIELD_NUMBER: _ClassVar[int]
    METRICS_URL_FIELD_NUMBER: _ClassVar[int]
    HTTP_URL_FIELD_NUMBER: _ClassVar[int]
    UNREACHED_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    bough_version: str
    workers: _containers.RepeatedCompositeFieldContainer[WorkerStatus]
    index_problem: str
    index_url: str
    is_draftless: bool
    metrics_url: str
    http_url: str
    unreached: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, protocol_version: _Optional[int] = ..., bough_version: _Optional[str] = ..., workers: _Optional[_Iterable[_Union[WorkerStatus, _Mapping]]] = ..., index_problem: _Optional[str] = ..., index_url: _Optional[str] = ..., is_draftless: _Optional[bool] = ..., metrics_url: _Optional[str] = ..., http_url: _Optional[str] = ..., unreached: _Optional[_Iterable[str]] = ...) -> None: ...

class GetLoadsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Loads(_message.Message):
    __slots__ = ("num_requests_running", "num_requests_waiting", "num_requests_total", "num_tokens_total", "max_requests_running", "max_requests_waiting", "wait_seconds")
    NUM_REQUESTS_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    MAX_REQUESTS_RUNNING_FIELD_NUMBER: _ClassVar[int]
    MAX_REQUESTS_WAITING_FIELD_NUMBER: _ClassVar[int]
    WAIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    num_requests_running: int
    num_requests_waiting: int
    num_requests_total: int
    num_tokens_total: int
    max_requests_running: int
    max_requests_waiting: int
    wait_seconds: float
    def __init__(self, num_requests_running: _Optional[int] = ..., num_requests_waiting: _Optional[int] = ..., num_requests_total: _Optional[int] = ..., num_tokens_total: _Optional[int] = ..., max_requests_running: _Optional[int] = ..., max_requests_waiting: _Optional[int] = ..., wait_seconds: _Optional[float] = ...) -> None: ...

class GetAcceptanceRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DepthCounts(_message.Message):
    __slots__ = ("accepted", "rejected")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    REJECTED_FIELD_NUMBER: _ClassVar[int]
    accepted: _containers.RepeatedScalarFieldContainer[float]
    rejected: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, accepted: _Optional[_Iterable[float]] = ..., rejected: _Optional[_Iterable[float]] = ...) -> None: ...

class SchemeAcceptance(_message.Message):
    __slots__ = ("scheme", "num_rounds", "depths")
    SCHEME_FIELD_NUMBER: _ClassVar[int]
    NUM_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    DEPTHS_FIELD_NUMBER: _ClassVar[int]
    scheme: _common_pb2.VerificationScheme
    num_rounds: int
    depths: _containers.RepeatedCompositeFieldContainer[DepthCounts]
    def __init__(self, scheme: _Optional[_Union[_common_pb2.VerificationScheme, str]] = ..., num_rounds: _Optional[int] = ..., depths: _Optional[_Iterable[_Union[DepthCounts, _Mapping]]] = ...) -> None: ...

class DraftCalibration(_message.Message):
    __slots__ = ("draft_id", "num_rounds", "expected_tokens", "realised_tokens", "expected_seconds", "realised_seconds")
    DRAFT_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REALISED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    REALISED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    draft_id: str
    num_rounds: int
    expected_tokens: float
    realised_tokens: float
    expected_seconds: float
    realised_seconds: float
    def __init__(self, draft_id: _Optional[str] = ..., num_rounds: _Optional[int] = ..., expected_tokens: _Optional[float] = ..., realised_tokens: _Optional[float] = ..., expected_seconds: _Optional[float] = ..., realised_seconds: _Optional[float] = ...) -> None: ...

class Acceptance(_message.Message):
    __slots__ = ("schemes", "drafts")
    SCHEMES_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_FIELD_NUMBER: _ClassVar[int]
    schemes: _containers.RepeatedCompositeFieldContainer[SchemeAcceptance]
    drafts: _containers.RepeatedCompositeFieldContainer[DraftCalibration]
    def __init__(self, schemes: _Optional[_Iterable[_Union[SchemeAcceptance, _Mapping]]] = ..., drafts: _Optional[_Iterable[_Union[DraftCalibration, _Mapping]]] = ...) -> None: ...

class GetDecisionsRequest(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    def __init__(self, session_id: _Optional[str] = ...) -> None: ...

class RoundSeconds(_message.Message):
    __slots__ = ("draft", "network", "queue", "sweep", "other")
    DRAFT_FIELD_NUMBER: _ClassVar[int]
    NETWORK_FIELD_NUMBER: _ClassVar[int]
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    SWEEP_FIELD_NUMBER: _ClassVar[int]
    OTHER_FIELD_NUMBER: _ClassVar[int]
    draft: float
    network: float
    queue: float
    sweep: float
    other: float
    def __init__(self, draft: _Optional[float] = ..., network: _Optional[float] = ..., queue: _Optional[float] = ..., sweep: _Optional[float] = ..., other: _Optional[float] = ...) -> None: ...

class Decision(_message.Message):
    __slots__ = ("number", "mode", "draft_id", "budget", "width", "depth", "price", "min_gain", "draft_rate", "plain_rate", "best_nodes", "num_context", "num_grown", "num_sent", "num_left_out", "num_steps", "num_rows", "expected_tokens", "tokens", "expected", "seconds", "plain_sweep", "expected_expert_ratio", "expert_ratio")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    DRAFT_ID_FIELD_NUMBER: _ClassVar[int]
    BUDGET_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    DEPTH_FIELD_NUMBER: _ClassVar[int]
    PRICE_FIELD_NUMBER: _ClassVar[int]
    MIN_GAIN_FIELD_NUMBER: _ClassVar[int]
    DRAFT_RATE_FIELD_NUMBER: _ClassVar[int]
    PLAIN_RATE_FIELD_NUMBER: _ClassVar[int]
    BEST_NODES_FIELD_NUMBER: _ClassVar[int]
    NUM_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    NUM_GROWN_FIELD_NUMBER: _ClassVar[int]
    NUM_SENT_FIELD_NUMBER: _ClassVar[int]
    NUM_LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    PLAIN_SWEEP_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_EXPERT_RATIO_FIELD_NUMBER: _ClassVar[int]
    EXPERT_RATIO_FIELD_NUMBER: _ClassVar[int]
    number: int
    mode: str
    draft_id: str
    budget: int
    width: int
    depth: int
    price: float
    min_gain: float
    draft_rate: float
    plain_rate: float
    best_nodes: int
    num_context: int
    num_grown: int
    num_sent: int
    num_left_out: int
    num_steps: int
    num_rows: int
    expected_tokens: float
    tokens: int
    expected: RoundSeconds
    seconds: RoundSeconds
    plain_sweep: float
    expected_expert_ratio: float
    expert_ratio: float
    def __init__(self, number: _Optional[int] = ..., mode: _Optional[str] = ..., draft_id: _Optional[str] = ..., budget: _Optional[int] = ..., width: _Optional[int] = ..., depth: _Optional[int] = ..., price: _Optional[float] = ..., min_gain: _Optional[float] = ..., draft_rate: _Optional[float] = ..., plain_rate: _Optional[float] = ..., best_nodes: _Optional[int] = ..., num_context: _Optional[int] = ..., num_grown: _Optional[int] = ..., num_sent: _Optional[int] = ..., num_left_out: _Optional[int] = ..., num_steps: _Optional[int] = ..., num_rows: _Optional[int] = ..., expected_tokens: _Optional[float] = ..., tokens: _Optional[int] = ..., expected: _Optional[_Union[RoundSeconds, _Mapping]] = ..., seconds: _Optional[_Union[RoundSeconds, _Mapping]] = ..., plain_sweep: _Optional[float] = ..., expected_expert_ratio: _Optional[float] = ..., expert_ratio: _Optional[float] = ...) -> None: ...

class Decisions(_message.Message):
    __slots__ = ("decisions",)
    DECISIONS_FIELD_NUMBER: _ClassVar[int]
    decisions: _containers.RepeatedCompositeFieldContainer[Decision]
    def __init__(self, decisions: _Optional[_Iterable[_Union[Decision, _Mapping]]] = ...) -> None: ...
