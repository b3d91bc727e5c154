from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class VerificationScheme(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TARGET: _ClassVar[VerificationScheme]
    WITHOUT_REPLACEMENT: _ClassVar[VerificationScheme]
    TRAVERSAL: _ClassVar[VerificationScheme]
TARGET: VerificationScheme
WITHOUT_REPLACEMENT: VerificationScheme
TRAVERSAL: VerificationScheme

class Tree(_message.Message):
    __slots__ = ("tokens", "parents", "log_probs", "draft_probs", "draws", "worth")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    LOG_PROBS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_PROBS_FIELD_NUMBER: _ClassVar[int]
    DRAWS_FIELD_NUMBER: _ClassVar[int]
    WORTH_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    parents: _containers.RepeatedScalarFieldContainer[int]
    log_probs: _containers.RepeatedScalarFieldContainer[float]
    draft_probs: DraftProbs
    draws: _containers.RepeatedScalarFieldContainer[int]
    worth: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, tokens: _Optional[_Iterable[int]] = ..., parents: _Optional[_Iterable[int]] = ..., log_probs: _Optional[_Iterable[float]] = ..., draft_probs: _Optional[_Union[DraftProbs, _Mapping]] = ..., draws: _Optional[_Iterable[int]] = ..., worth: _Optional[_Iterable[float]] = ...) -> None: ...

class DraftProbs(_message.Message):
    __slots__ = ("nodes", "sizes", "tokens", "weights")
    NODES_FIELD_NUMBER: _ClassVar[int]
    SIZES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    nodes: _containers.RepeatedScalarFieldContainer[int]
    sizes: _containers.RepeatedScalarFieldContainer[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    weights: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, nodes: _Optional[_Iterable[int]] = ..., sizes: _Optional[_Iterable[int]] = ..., tokens: _Optional[_Iterable[int]] = ..., weights: _Optional[_Iterable[float]] = ...) -> None: ...

class BestFirst(_message.Message):
    __slots__ = ("budget", "width", "depth", "min_gain", "seconds")
    BUDGET_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    DEPTH_FIELD_NUMBER: _ClassVar[int]
    MIN_GAIN_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    budget: int
    width: int
    depth: int
    min_gain: float
    seconds: float
    def __init__(self, budget: _Optional[int] = ..., width: _Optional[int] = ..., depth: _Optional[int] = ..., min_gain: _Optional[float] = ..., seconds: _Optional[float] = ...) -> None: ...

class StaticShape(_message.Message):
    __slots__ = ("parents",)
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    parents: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, parents: _Optional[_Iterable[int]] = ...) -> None: ...

class Growth(_message.Message):
    __slots__ = ("best_first", "shape")
    BEST_FIRST_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    best_first: BestFirst
    shape: StaticShape
    def __init__(self, best_first: _Optional[_Union[BestFirst, _Mapping]] = ..., shape: _Optional[_Union[StaticShape, _Mapping]] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "seed", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "logprobs", "stop_token_ids", "min_tokens", "grammar", "top_n_sigma")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    TOP_N_SIGMA_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    logprobs: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    min_tokens: int
    grammar: str
    top_n_sigma: float
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., seed: _Optional[int] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., logprobs: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., min_tokens: _Optional[int] = ..., grammar: _Optional[str] = ..., top_n_sigma: _Optional[float] = ...) -> None: ...

class TokenLogprob(_message.Message):
    __slots__ = ("token_id", "logprob")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ...) -> None: ...

class PositionLogprobs(_message.Message):
    __slots__ = ("token", "top")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    token: TokenLogprob
    top: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    def __init__(self, token: _Optional[_Union[TokenLogprob, _Mapping]] = ..., top: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ...) -> None: ...

class Context(_message.Message):
    __slots__ = ("session_id", "context_start", "prefix_hash", "tokens", "prompt_length", "cache_salt")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_START_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HASH_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    context_start: int
    prefix_hash: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    prompt_length: int
    cache_salt: str
    def __init__(self, session_id: _Optional[str] = ..., context_start: _Optional[int] = ..., prefix_hash: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., prompt_length: _Optional[int] = ..., cache_salt: _Optional[str] = ...) -> None: ...

class Timings(_message.Message):
    __slots__ = ("total_ns", "queue_ns", "wait_ns", "compute_ns", "link_ns", "link_bytes", "num_passes", "link_ideal_ns", "num_experts", "row_experts")
    TOTAL_NS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_NS_FIELD_NUMBER: _ClassVar[int]
    WAIT_NS_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_NS_FIELD_NUMBER: _ClassVar[int]
    LINK_NS_FIELD_NUMBER: _ClassVar[int]
    LINK_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_PASSES_FIELD_NUMBER: _ClassVar[int]
    LINK_IDEAL_NS_FIELD_NUMBER: _ClassVar[int]
    NUM_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    ROW_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    total_ns: int
    queue_ns: int
    wait_ns: int
    compute_ns: int
    link_ns: int
    link_bytes: int
    num_passes: int
    link_ideal_ns: int
    num_experts: int
    row_experts: int
    def __init__(self, total_ns: _Optional[int] = ..., queue_ns: _Optional[int] = ..., wait_ns: _Optional[int] = ..., compute_ns: _Optional[int] = ..., link_ns: _Optional[int] = ..., link_bytes: _Optional[int] = ..., num_passes: _Optional[int] = ..., link_ideal_ns: _Optional[int] = ..., num_experts: _Optional[int] = ..., row_experts: _Optional[int] = ...) -> None: ...

class CostCurve(_message.Message):
    __slots__ = ("rows", "seconds", "step")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    rows: _containers.RepeatedScalarFieldContainer[int]
    seconds: _containers.RepeatedScalarFieldContainer[float]
    step: int
    def __init__(self, rows: _Optional[_Iterable[int]] = ..., seconds: _Optional[_Iterable[float]] = ..., step: _Optional[int] = ...) -> None: ...

class WorkerInfo(_message.Message):
    __slots__ = ("protocol_version", "bough_version", "kind", "worker_id", "model_name", "model_description", "model_fingerprint", "tokenizer_fingerprint", "vocab_size", "max_context", "max_nodes", "max_sessions", "num_sessions", "link_bytes_per_pass", "notes", "kv_bytes", "kv_used_bytes", "num_waiting", "arithmetic", "cost", "num_running", "num_passes", "weights_hash", "context_limit", "stages", "stage_network_ns")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    BOUGH_VERSION_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    MODEL_DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    MAX_NODES_FIELD_NUMBER: _ClassVar[int]
    MAX_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    LINK_BYTES_PER_PASS_FIELD_NUMBER: _ClassVar[int]
    NOTES_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    KV_USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    ARITHMETIC_FIELD_NUMBER: _ClassVar[int]
    COST_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_PASSES_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_HASH_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LIMIT_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    STAGE_NETWORK_NS_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    bough_version: str
    kind: str
    worker_id: str
    model_name: str
    model_description: str
    model_fingerprint: str
    tokenizer_fingerprint: str
    vocab_size: int
    max_context: int
    max_nodes: int
    max_sessions: int
    num_sessions: int
    link_bytes_per_pass: int
    notes: _containers.RepeatedScalarFieldContainer[str]
    kv_bytes: int
    kv_used_bytes: int
    num_waiting: int
    arithmetic: str
    cost: CostCurve
    num_running: int
    num_passes: int
    weights_hash: str
    context_limit: str
    stages: _containers.RepeatedCompositeFieldContainer[StageStatus]
    stage_network_ns: int
    def __init__(self, protocol_version: _Optional[int] = ..., bough_version: _Optional[str] = ..., kind: _Optional[str] = ..., worker_id: _Optional[str] = ..., model_name: _Optional[str] = ..., model_description: _Optional[str] = ..., model_fingerprint: _Optional[str] = ..., tokenizer_fingerprint: _Optional[str] = ..., vocab_size: _Optional[int] = ..., max_context: _Optional[int] = ..., max_nodes: _Optional[int] = ..., max_sessions: _Optional[int] = ..., num_sessions: _Optional[int] = ..., link_bytes_per_pass: _Optional[int] = ..., notes: _Optional[_Iterable[str]] = ..., kv_bytes: _Optional[int] = ..., kv_used_bytes: _Optional[int] = ..., num_waiting: _Optional[int] = ..., arithmetic: _Optional[str] = ..., cost: _Optional[_Union[CostCurve, _Mapping]] = ..., num_running: _Optional[int] = ..., num_passes: _Optional[int] = ..., weights_hash: _Optional[str] = ..., context_limit: _Optional[str] = ..., stages: _Optional[_Iterable[_Union[StageStatus, _Mapping]]] = ..., stage_network_ns: _Optional[int] = ...) -> None: ...

class StageStatus(_message.Message):
    __slots__ = ("address", "first_layer", "end_layer", "memory_bytes", "wait_ns", "compute_ns", "queue_ns")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    FIRST_LAYER_FIELD_NUMBER: _ClassVar[int]
    END_LAYER_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    WAIT_NS_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_NS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_NS_FIELD_NUMBER: _ClassVar[int]
    address: str
    first_layer: int
    end_layer: int
    memory_bytes: int
    wait_ns: int
    compute_ns: int
    queue_ns: int
    def __init__(self, address: _Optional[str] = ..., first_layer: _Optional[int] = ..., end_layer: _Optional[int] = ..., memory_bytes: _Optional[int] = ..., wait_ns: _Optional[int] = ..., compute_ns: _Optional[int] = ..., queue_ns: _Optional[int] = ...) -> None: ...

class GetServerInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetTokenizerRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TokenizerChunk(_message.Message):
    __slots__ = ("tokenizer_json", "chat_template", "eos_token_ids", "bos_token", "eos_token", "tool_template")
    TOKENIZER_JSON_FIELD_NUMBER: _ClassVar[int]
    CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BOS_TOKEN_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_FIELD_NUMBER: _ClassVar[int]
    TOOL_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    tokenizer_json: bytes
    chat_template: str
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    bos_token: str
    eos_token: str
    tool_template: str
    def __init__(self, tokenizer_json: _Optional[bytes] = ..., chat_template: _Optional[str] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., bos_token: _Optional[str] = ..., eos_token: _Optional[str] = ..., tool_template: _Optional[str] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("session_id", "epoch")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    epoch: int
    def __init__(self, session_id: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class ReleaseReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
