"""A device that pretends to be a GPU: its tensors' bytes are out of the CPU's reach, and what it does is recorded.

torch's Python backend for PrivateUse1 gives it a device type of its own. It refuses what a GPU refuses (operands on
two devices, numpy), fills uninitialised memory with 0xFF, and counts what would stall a GPU (values read by the host,
copies from pageable memory). Operators run at once, in the compute stream of their device; copies run when
`pretend_streams` decides.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

from bough.model.backends import triton
from loadtest.gpu.reference import attend_by_mask
from tests.fakes.gpu import unpacking as by_cpu
from tests.fakes.gpu.pretend_order import Order, compute_stream

NAME = "pretend"
UNWRITTEN = 0xFF  # NaN in every floating type
ASKING = {"_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "_unique2", "unique_dim"}
MAKING = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
VIEWING = {"view", "slice", "select", "unsqueeze", "expand", "t", "transpose", "alias", "detach", "permute", "split"}
VIEWING |= {"squeeze", "as_strided", "split_with_sizes", "_unsafe_view", "unbind", "chunk", "diagonal", "unfold"}
UNCOUNTED = VIEWING | MAKING
WHOLE = {"linear", "matmul", "pad"}  # one launch on a GPU, although torch could decompose them
PRODUCTS = {
    "linear",
    "matmul",
    "mm",
    "bmm",
    "addmm",
    "baddbmm",
}  # rounded once: bits do not depend on the order of sums


@dataclass
class Notes:
    """What has happened on the device since `clear`."""

    launches: Counter[str] = field(default_factory=Counter)  # by operator, without views
    stops: list[str] = field(default_factory=list)  # operators for which the host waited for the device
    sends: list[str] = field(default_factory=list)  # copies to the device outside its copy stream, which also stall it
    inside: list[str] = field(default_factory=list)  # stops and sends within a layer
    crossings: list[str] = field(default_factory=list)  # copies from one device to another
    is_in_layer: bool = False
    is_capturing: bool = False
    order: Order = field(default_factory=Order)

    def begin(self) -> None:
        """Forget everything, races and their order included."""
        vars(self).update(vars(Notes()))

    def clear(self) -> None:
        """Forget counts and lists, but not the order of accesses."""
        self.launches.clear()
        for notes in (self.stops, self.sends, self.inside, self.crossings):
            notes.clear()

    def stop(self, what: str, index: int) -> None:
        """Record that the host waits until a device has done all work."""
        self._note(self.stops, what)
        self.order.host_waits(self.order.progress_of(compute_stream(index)))

    def send(self, what: str) -> None:
        """Record a copy from pageable memory."""
        self._note(self.sends, what)

    def _note(self, notes: list[str], what: str) -> None:
        if self.is_capturing:
            raise RuntimeError(f"operation not permitted when stream is capturing: {what}")
        notes.append(what)
        if self.is_in_layer:
            self.inside.append(what)


notes = Notes()  # of all devices of the process


class Pretended(torch.Tensor):
    """A tensor on the device; `raw` is the CPU tensor with its memory."""

    raw: torch.Tensor

    @staticmethod
    def __new__(cls, raw: torch.Tensor, index: int = 0) -> Pretended:
        with torch._C._InferenceMode(False):  # what torch.inference_mode enters, in a third of its time
            made = torch.Tensor._make_wrapper_subclass(
                cls,
                raw.shape,
                strides=raw.stride(),
                storage_offset=raw.storage_offset(),
                dtype=raw.dtype,
                device=device(index),
            )
        made.raw = raw
        return made

    def __repr__(self, **_: Any) -> str:
        return f"Pretended({tuple(self.shape)}, {self.dtype})"

    def data_ptr(self) -> int:
        return self.raw.data_ptr()

    def is_contiguous(self, *args: Any, **kwargs: Any) -> bool:
        return self.raw.is_contiguous(*args, **kwargs)

    def numpy(self, *_: Any, **__: Any) -> Any:
        raise TypeError(f"can't convert {self.device} device type tensor to numpy")

    def tolist(self) -> Any:
        notes.stop("tolist", self.device.index)
        return self.raw.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


class _Backend(_DummyBackendModule):
    """The counterpart of the module `torch.cuda`: knows on which device kernels are launched."""

    def __init__(self) -> None:
        self.current = 0

    def current_device(self) -> int:
        return self.current

    @contextmanager
    def device(self, where: torch.device) -> Iterator[None]:
        before, self.current = self.current, where.index or 0
        try:
            yield
        finally:
            self.current = before


backend = _Backend()


@cache
def _register() -> None:
    """Register the device type with torch, for the rest of the process."""
    _setup_privateuseone_for_python_backend(NAME, backend)


@cache
def device(index: int = 0) -> torch.device:
    """A device by its index; there are as many as are needed."""
    _register()
    return torch.device(NAME, index)


def tensors_in(values: Any) -> list[torch.Tensor]:
    """The tensors among an operator's operands, which are nested in lists at most; torch's tree_leaves takes longer."""
    if isinstance(values, torch.Tensor):
        return [values]
    if isinstance(values, dict):
        values = values.values()
    elif not isinstance(values, tuple | list):
        return []
    return [tensor for value in values for tensor in tensors_in(value)]


def _raw_of_all(values: Any) -> Any:
    """`raw` of all of an operator's operands."""
    if isinstance(values, tuple | list):
        return [_raw_of_all(value) for value in values]
    return raw(values)


def raw(value: Any) -> Any:
    """The CPU tensor behind a tensor on the device; any other value unchanged."""
    return value.raw if isinstance(value, Pretended) else value


def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator; if it reads or makes tensors on the device, check and record it."""
    name, where = func.overloadpacket.__name__, kwargs.get("device")
    tensors = tensors_in((args, kwargs))
    mine = [x for x in tensors if isinstance(x, Pretended)]
    makes_mine = where is not None and torch.device(where).type == NAME
    if not mine and not makes_mine:
        return func(*args, **kwargs)
    if name not in WHOLE and _is_composite(func):
        with _Making():
            taken_apart = func.decompose(*args, **kwargs)
        if taken_apart is not NotImplemented:
            return taken_apart
    if name in {"_to_copy", "copy_"} and (made := _copied(func, name, args, kwargs)) is not None:
        return made
    _refuse_mixing(func, name, mine, [x for x in tensors if not isinstance(x, Pretended) and x.dim()])
    return _launched(func, name, args, kwargs, mine, makes_mine)


@cache
def _is_composite(func: Any) -> bool:
    has_kernel: bool = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")
    return has_kernel


def _copied(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator that copies between host and device, or between devices; None if it does not copy."""
    source = args[1] if name == "copy_" else args[0]
    where = args[0].device if name == "copy_" else torch.device(kwargs.get("device") or source.device)
    if source.device.type == where.type:
        return None if where.index in (None, source.device.index) else _crossed(func, name, args, kwargs, where)
    index = (source.device.index if where.type == "cpu" else where.index) or 0
    notes.order.computes([raw(source)], [raw(args[0])] if name == "copy_" else [], index)
    what = f"{name} {tuple(source.shape)}"
    notes.stop(what, index) if where.type == "cpu" else notes.send(what)
    if name == "copy_":
        raw(args[0]).copy_(raw(source))
        return args[0]
    made = func(raw(source), **{key: value for key, value in kwargs.items() if key != "device"})
    made = made.clone() if made.data_ptr() == raw(source).data_ptr() else made
    return made if where.type == "cpu" else Pretended(made, where.index or 0)


def _crossed(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], where: torch.device) -> Any:
    """Run a copy from one device to another: both devices wait for it, and the host does not."""
    source = args[1] if name == "copy_" else args[0]
    notes.crossings.append(f"{name} {tuple(source.shape)} to {where}")
    both = source.device.index or 0, where.index or 0
    notes.order.crosses([raw(source)], [raw(args[0])] if name == "copy_" else [], *both)
    if name == "copy_":
        raw(args[0]).copy_(raw(source))
        return args[0]
    return Pretended(
        func(raw(source), **{key: value for key, value in kwargs.items() if key != "device"}).clone(), where.index
    )


def _refuse_mixing(func: Any, name: str, mine: list[Pretended], others: list[torch.Tensor]) -> None:
    if len({x.device for x in mine if x.dim()}) > 1:
        raise RuntimeError(f"{func}: Expected all tensors to be on the same device, but found two of {NAME}")
    if not mine or not others:
        return
    if name in {"index", "index_put_"}:  # they accept indices in host memory
        notes.send(f"{name} with indices in host memory")
        return
    places = {str(x.device) for x in (*mine, *others)}
    raise RuntimeError(f"{func}: Expected all tensors to be on the same device, but found {sorted(places)}")


def _launched(func: Any, name: str, args: Any, kwargs: dict[str, Any], mine: list[Pretended], makes_mine: bool) -> Any:
    raws = {key: _raw_of_all(value) for key, value in kwargs.items()}
    index = mine[0].device.index if mine else 0
    if name in ASKING:
        notes.stop(name, index)
    if makes_mine:
        index, raws["device"] = torch.device(kwargs["device"]).index or 0, torch.device("cpu")
    out = (partial(_product, func) if name in PRODUCTS else func)(*_raw_of_all(args), **raws)
    written = _written(func, args, kwargs)
    if name not in UNCOUNTED:
        notes.launches[name] += 1
        notes.order.computes([x.raw for x in mine], [raw(x) for x in written], index)
    if name in MAKING and out.dtype != torch.bool and out.is_contiguous():
        out.flatten().view(torch.uint8).fill_(UNWRITTEN)
    if written and isinstance(out, torch.Tensor):
        return written[0]

    def wrapped(x: Any) -> Any:
        return Pretended(x, index) if isinstance(x, torch.Tensor) and not isinstance(x, Pretended) else x

    return wrapped(out) if isinstance(out, torch.Tensor) else tree_map(wrapped, out)


def _product(func: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """A product with sums in float64."""
    wide = (x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in args)
    out: torch.Tensor = func(*wide, **kwargs)
    return out.to(args[0].dtype)


def _written(func: Any, args: Any, kwargs: dict[str, Any]) -> list[Any]:
    """The operands that an operator writes to."""
    places = _places_written(func)
    return [
        args[place] if place < len(args) else kwargs[name]
        for place, name in places
        if place < len(args) or name in kwargs
    ]


@cache
def _places_written(func: Any) -> tuple[tuple[int, str], ...]:
    """Place and name of each such operand: a schema's arguments are created again whenever they are read."""
    named = enumerate(func._schema.arguments)
    return tuple((place, a.name) for place, a in named if a.alias_info is not None and a.alias_info.is_write)


class EagerMode(TorchDispatchMode):
    """A mode around what is never compiled: torch else imports its compiler, and asks it at each operator."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Whether torch is to keep its compiler out of `__torch_dispatch__`, which takes the compiler."""
        return False


class _Making(EagerMode):
    """Intercepts operators without tensor operands."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


def _sending(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`torch.tensor` that allocates on the host and copies to the device."""

    def tensor(*args: Any, **kwargs: Any) -> torch.Tensor:
        if str(kwargs.get("device", "cpu")).startswith(NAME):
            where = kwargs.pop("device")
            return make(*args, **kwargs).to(where)
        return make(*args, **kwargs)

    return tensor


def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function as a kernel launch: it gets CPU tensors, and returns tensors or writes to its last operand."""

    def launch(*args: Any, **kwargs: Any) -> Any:
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        assert all(isinstance(x, Pretended) for x in tensors), "all operands of a kernel must be on the device"
        assert len({x.device for x in tensors}) == 1, "and on the same one"
        index = tensors[0].device.index
        assert index == backend.current, f"launched on {NAME}:{backend.current} over memory of {NAME}:{index}"
        notes.launches[function.__name__] += 1
        out = function(*tree_map(raw, args), **tree_map(raw, kwargs))
        notes.order.computes([raw(x) for x in tensors], [raw(tensors[-1])] if out is None else [], index)
        return tree_map(lambda made: Pretended(made, index) if isinstance(made, torch.Tensor) else made, out)

    return launch


def attend(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, paths: Any, *rules: Any) -> torch.Tensor:
    """The reference attention in the data type of `queries`; the interpreter would take long for the Triton kernel.

    Like the kernel's, its rows that are in no tile are left as they were.
    """
    out = queries.new_full((*queries.shape[:2], values.shape[2]), torch.nan)
    for begin, end in paths.tiles.tolist():
        if begin < end:
            out[begin:end] = 0.0
    in_tiles = out == 0.0
    return torch.where(in_tiles, attend_by_mask(queries, keys, values, paths, *rules).to(out.dtype), out)


@contextmanager
def pretending(attends: Callable[..., torch.Tensor] = attend, unpacking: ModuleType = by_cpu) -> Iterator[Notes]:
    """Let this thread make tensors on the device within the block; yields the notes of what happens.

    `torch.tensor` is another function meanwhile, for all threads: of theirs none makes tensors there.
    `attends` stands in for its attention kernel, and functions of the module `unpacking` for others, as far as it has
    them; `bough.model.gpu.unpack_triton` has those that unpack weights, interpreted.
    """
    device()
    notes.begin()
    with _Making(), pytest.MonkeyPatch.context() as patch:
        functions = vars(by_cpu) | vars(unpacking)
        unpack = [functions[name] for name in triton.Kernels._fields[1:]]
        patch.setattr(triton, "kernels", lambda: triton.Kernels(*map(kernel, (attends, *unpack))))
        patch.setattr(torch, "tensor", _sending(torch.tensor))  # a TorchFunctionMode would be asked at every call
        yield notes
