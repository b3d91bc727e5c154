from bough.pb import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class VerifyRequest(_message.Message):
    __slots__ = ("context", "epoch", "round", "tree", "sampling", "scheme", "max_length", "caller", "num_running", "worker_id", "may_leave_out", "reserves", "is_given")
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    TREE_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    SCHEME_FIELD_NUMBER: _ClassVar[int]
    MAX_LENGTH_FIELD_NUMBER: _ClassVar[int]
    CALLER_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    MAY_LEAVE_OUT_FIELD_NUMBER: _ClassVar[int]
    RESERVES_FIELD_NUMBER: _ClassVar[int]
    IS_GIVEN_FIELD_NUMBER: _ClassVar[int]
    context: _common_pb2.Context
    epoch: int
    round: int
    tree: _common_pb2.Tree
    sampling: _common_pb2.SamplingParams
    scheme: _common_pb2.VerificationScheme
    max_length: int
    caller: str
    num_running: int
    worker_id: str
    may_leave_out: bool
    reserves: bool
    is_given: bool
    def __init__(self, context: _Optional[_Union[_common_pb2.Context, _Mapping]] = ..., epoch: _Optional[int] = ..., round: _Optional[int] = ..., tree: _Optional[_Union[_common_pb2.Tree, _Mapping]] = ..., sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., scheme: _Optional[_Union[_common_pb2.VerificationScheme, str]] = ..., max_length: _Optional[int] = ..., caller: _Optional[str] = ..., num_running: _Optional[int] = ..., worker_id: _Optional[str] = ..., may_leave_out: _Optional[bool] = ..., reserves: _Optional[bool] = ..., is_given: _Optional[bool] = ...) -> None: ...

class VerifyReply(_message.Message):
    __slots__ = ("accepted_nodes", "bonus_token", "logprobs", "held_length", "timings", "cached_length", "left_out_nodes", "cost", "num_rows", "num_trees", "expected_expert_ratio")
    ACCEPTED_NODES_FIELD_NUMBER: _ClassVar[int]
    BONUS_TOKEN_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    HELD_LENGTH_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    CACHED_LENGTH_FIELD_NUMBER: _ClassVar[int]
    LEFT_OUT_NODES_FIELD_NUMBER: _ClassVar[int]
    COST_FIELD_NUMBER: _ClassVar[int]
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    NUM_TREES_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_EXPERT_RATIO_FIELD_NUMBER: _ClassVar[int]
    accepted_nodes: _containers.RepeatedScalarFieldContainer[int]
    bonus_token: int
    logprobs: _containers.RepeatedCompositeFieldContainer[_common_pb2.PositionLogprobs]
    held_length: int
    timings: _common_pb2.Timings
    cached_length: int
    left_out_nodes: _containers.RepeatedScalarFieldContainer[int]
    cost: _common_pb2.CostCurve
    num_rows: int
    num_trees: int
    expected_expert_ratio: float
    def __init__(self, accepted_nodes: _Optional[_Iterable[int]] = ..., bonus_token: _Optional[int] = ..., logprobs: _Optional[_Iterable[_Union[_common_pb2.PositionLogprobs, _Mapping]]] = ..., held_length: _Optional[int] = ..., timings: _Optional[_Union[_common_pb2.Timings, _Mapping]] = ..., cached_length: _Optional[int] = ..., left_out_nodes: _Optional[_Iterable[int]] = ..., cost: _Optional[_Union[_common_pb2.CostCurve, _Mapping]] = ..., num_rows: _Optional[int] = ..., num_trees: _Optional[int] = ..., expected_expert_ratio: _Optional[float] = ...) -> None: ...
