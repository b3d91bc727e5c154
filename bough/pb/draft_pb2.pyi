from bough.pb import common_pb2 as _common_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GrowRequest(_message.Message):
    __slots__ = ("context", "root_token", "sampling", "round", "growth", "scheme", "vocab_size", "epoch")
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    ROOT_TOKEN_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    GROWTH_FIELD_NUMBER: _ClassVar[int]
    SCHEME_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    context: _common_pb2.Context
    root_token: int
    sampling: _common_pb2.SamplingParams
    round: int
    growth: _common_pb2.Growth
    scheme: _common_pb2.VerificationScheme
    vocab_size: int
    epoch: int
    def __init__(self, context: _Optional[_Union[_common_pb2.Context, _Mapping]] = ..., root_token: _Optional[int] = ..., sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., round: _Optional[int] = ..., growth: _Optional[_Union[_common_pb2.Growth, _Mapping]] = ..., scheme: _Optional[_Union[_common_pb2.VerificationScheme, str]] = ..., vocab_size: _Optional[int] = ..., epoch: _Optional[int] = ...) -> None: ...

class GrowReply(_message.Message):
    __slots__ = ("tree", "held_length", "timings", "num_warm_nodes", "cost")
    TREE_FIELD_NUMBER: _ClassVar[int]
    HELD_LENGTH_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    NUM_WARM_NODES_FIELD_NUMBER: _ClassVar[int]
    COST_FIELD_NUMBER: _ClassVar[int]
    tree: _common_pb2.Tree
    held_length: int
    timings: _common_pb2.Timings
    num_warm_nodes: int
    cost: _common_pb2.CostCurve
    def __init__(self, tree: _Optional[_Union[_common_pb2.Tree, _Mapping]] = ..., held_length: _Optional[int] = ..., timings: _Optional[_Union[_common_pb2.Timings, _Mapping]] = ..., num_warm_nodes: _Optional[int] = ..., cost: _Optional[_Union[_common_pb2.CostCurve, _Mapping]] = ...) -> None: ...
