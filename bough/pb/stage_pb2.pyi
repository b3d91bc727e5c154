from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class StageFacts(_message.Message):
    __slots__ = ("bough_version", "code", "checkpoint", "tokenizer", "dtype", "arithmetic")
    BOUGH_VERSION_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    ARITHMETIC_FIELD_NUMBER: _ClassVar[int]
    bough_version: str
    code: str
    checkpoint: str
    tokenizer: str
    dtype: str
    arithmetic: str
    def __init__(self, bough_version: _Optional[str] = ..., code: _Optional[str] = ..., checkpoint: _Optional[str] = ..., tokenizer: _Optional[str] = ..., dtype: _Optional[str] = ..., arithmetic: _Optional[str] = ...) -> None: ...

class StageRoom(_message.Message):
    __slots__ = ("memory_bytes", "link_bytes_per_second", "layer_seconds", "name", "num_threads", "kv_on_host")
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    LINK_BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    LAYER_SECONDS_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    NUM_THREADS_FIELD_NUMBER: _ClassVar[int]
    KV_ON_HOST_FIELD_NUMBER: _ClassVar[int]
    memory_bytes: int
    link_bytes_per_second: float
    layer_seconds: float
    name: str
    num_threads: int
    kv_on_host: bool
    def __init__(self, memory_bytes: _Optional[int] = ..., link_bytes_per_second: _Optional[float] = ..., layer_seconds: _Optional[float] = ..., name: _Optional[str] = ..., num_threads: _Optional[int] = ..., kv_on_host: _Optional[bool] = ...) -> None: ...

class StageFigures(_message.Message):
    __slots__ = ("first_layer", "end_layer", "memory_bytes", "device", "num_rows", "num_states", "max_context")
    FIRST_LAYER_FIELD_NUMBER: _ClassVar[int]
    END_LAYER_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    NUM_STATES_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    first_layer: int
    end_layer: int
    memory_bytes: int
    device: str
    num_rows: int
    num_states: int
    max_context: int
    def __init__(self, first_layer: _Optional[int] = ..., end_layer: _Optional[int] = ..., memory_bytes: _Optional[int] = ..., device: _Optional[str] = ..., num_rows: _Optional[int] = ..., num_states: _Optional[int] = ..., max_context: _Optional[int] = ...) -> None: ...

class JoinRequest(_message.Message):
    __slots__ = ("stage_id", "address", "facts", "room", "figures")
    STAGE_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    FACTS_FIELD_NUMBER: _ClassVar[int]
    ROOM_FIELD_NUMBER: _ClassVar[int]
    FIGURES_FIELD_NUMBER: _ClassVar[int]
    stage_id: str
    address: str
    facts: StageFacts
    room: StageRoom
    figures: StageFigures
    def __init__(self, stage_id: _Optional[str] = ..., address: _Optional[str] = ..., facts: _Optional[_Union[StageFacts, _Mapping]] = ..., room: _Optional[_Union[StageRoom, _Mapping]] = ..., figures: _Optional[_Union[StageFigures, _Mapping]] = ...) -> None: ...

class Assignment(_message.Message):
    __slots__ = ("number", "first_layer", "end_layer", "num_rows", "num_states", "max_context", "max_nodes", "max_sweep_tokens", "product_rows")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    FIRST_LAYER_FIELD_NUMBER: _ClassVar[int]
    END_LAYER_FIELD_NUMBER: _ClassVar[int]
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    NUM_STATES_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    MAX_NODES_FIELD_NUMBER: _ClassVar[int]
    MAX_SWEEP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PRODUCT_ROWS_FIELD_NUMBER: _ClassVar[int]
    number: int
    first_layer: int
    end_layer: int
    num_rows: int
    num_states: int
    max_context: int
    max_nodes: int
    max_sweep_tokens: int
    product_rows: int
    def __init__(self, number: _Optional[int] = ..., first_layer: _Optional[int] = ..., end_layer: _Optional[int] = ..., num_rows: _Optional[int] = ..., num_states: _Optional[int] = ..., max_context: _Optional[int] = ..., max_nodes: _Optional[int] = ..., max_sweep_tokens: _Optional[int] = ..., product_rows: _Optional[int] = ...) -> None: ...

class JoinReply(_message.Message):
    __slots__ = ("num_missing", "assignment")
    NUM_MISSING_FIELD_NUMBER: _ClassVar[int]
    ASSIGNMENT_FIELD_NUMBER: _ClassVar[int]
    num_missing: int
    assignment: Assignment
    def __init__(self, num_missing: _Optional[int] = ..., assignment: _Optional[_Union[Assignment, _Mapping]] = ...) -> None: ...

class RingHello(_message.Message):
    __slots__ = ("epoch", "members", "number", "payload")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    members: _containers.RepeatedScalarFieldContainer[str]
    number: int
    payload: bytes
    def __init__(self, epoch: _Optional[int] = ..., members: _Optional[_Iterable[str]] = ..., number: _Optional[int] = ..., payload: _Optional[bytes] = ...) -> None: ...

class FramePiece(_message.Message):
    __slots__ = ("frame", "offset", "header_bytes", "body_bytes", "header", "body")
    FRAME_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    HEADER_BYTES_FIELD_NUMBER: _ClassVar[int]
    BODY_BYTES_FIELD_NUMBER: _ClassVar[int]
    HEADER_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    frame: int
    offset: int
    header_bytes: int
    body_bytes: int
    header: bytes
    body: bytes
    def __init__(self, frame: _Optional[int] = ..., offset: _Optional[int] = ..., header_bytes: _Optional[int] = ..., body_bytes: _Optional[int] = ..., header: _Optional[bytes] = ..., body: _Optional[bytes] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RingEnd(_message.Message):
    __slots__ = ("why",)
    WHY_FIELD_NUMBER: _ClassVar[int]
    why: str
    def __init__(self, why: _Optional[str] = ...) -> None: ...

class PassRequest(_message.Message):
    __slots__ = ("hello", "piece", "heartbeat", "end")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    PIECE_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    hello: RingHello
    piece: FramePiece
    heartbeat: Heartbeat
    end: RingEnd
    def __init__(self, hello: _Optional[_Union[RingHello, _Mapping]] = ..., piece: _Optional[_Union[FramePiece, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., end: _Optional[_Union[RingEnd, _Mapping]] = ...) -> None: ...

class PassReply(_message.Message):
    __slots__ = ("why",)
    WHY_FIELD_NUMBER: _ClassVar[int]
    why: str
    def __init__(self, why: _Optional[str] = ...) -> None: ...
