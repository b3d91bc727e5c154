from bough.pb import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SlotChangeKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SLOT_CHANGE_UNSPECIFIED: _ClassVar[SlotChangeKind]
    SLOT_MOVED: _ClassVar[SlotChangeKind]
    SLOT_FORKED: _ClassVar[SlotChangeKind]
    SLOT_COMMITTED: _ClassVar[SlotChangeKind]
    SLOT_ROLLED_BACK: _ClassVar[SlotChangeKind]
    SLOT_SNAPSHOTS: _ClassVar[SlotChangeKind]
    SLOT_CLEARED: _ClassVar[SlotChangeKind]
SLOT_CHANGE_UNSPECIFIED: SlotChangeKind
SLOT_MOVED: SlotChangeKind
SLOT_FORKED: SlotChangeKind
SLOT_COMMITTED: SlotChangeKind
SLOT_ROLLED_BACK: SlotChangeKind
SLOT_SNAPSHOTS: SlotChangeKind
SLOT_CLEARED: SlotChangeKind

class SlotChange(_message.Message):
    __slots__ = ("slot", "kind", "numbers")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    NUMBERS_FIELD_NUMBER: _ClassVar[int]
    slot: int
    kind: SlotChangeKind
    numbers: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, slot: _Optional[int] = ..., kind: _Optional[_Union[SlotChangeKind, str]] = ..., numbers: _Optional[_Iterable[int]] = ...) -> None: ...

class PassRows(_message.Message):
    __slots__ = ("slot", "base", "num_tokens", "parents")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    slot: int
    base: int
    num_tokens: int
    parents: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, slot: _Optional[int] = ..., base: _Optional[int] = ..., num_tokens: _Optional[int] = ..., parents: _Optional[_Iterable[int]] = ...) -> None: ...

class StagePass(_message.Message):
    __slots__ = ("changes", "rows", "dtype", "width", "timings", "full")
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    FULL_FIELD_NUMBER: _ClassVar[int]
    changes: _containers.RepeatedCompositeFieldContainer[SlotChange]
    rows: _containers.RepeatedCompositeFieldContainer[PassRows]
    dtype: str
    width: int
    timings: _containers.RepeatedCompositeFieldContainer[_common_pb2.Timings]
    full: str
    def __init__(self, changes: _Optional[_Iterable[_Union[SlotChange, _Mapping]]] = ..., rows: _Optional[_Iterable[_Union[PassRows, _Mapping]]] = ..., dtype: _Optional[str] = ..., width: _Optional[int] = ..., timings: _Optional[_Iterable[_Union[_common_pb2.Timings, _Mapping]]] = ..., full: _Optional[str] = ...) -> None: ...
