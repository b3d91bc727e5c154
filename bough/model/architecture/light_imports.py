"""Loads transformers' modelling code without torch's compiler and without distributed tensors.

    python -m bough.model.architecture.light_imports MODULE ARGUMENTS...    then runs it like `python -m`

Importing it pulls in torch._dynamo, the inductor, sympy and torch.distributed.tensor, for decorators that matter to
`torch.compile` alone and for tensors that are spread over processes. A worker uses neither; they took a third of its
imports and 140 MB. So while transformers is loaded, torch._dynamo is a stand-in whose decorators leave functions as
they are, and transformers is told that torch was built without torch.distributed and flex attention, as some builds
are.
"""

from __future__ import annotations

import importlib
import logging
import runpy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

logger = logging.getLogger(__name__)

COMPILER = "torch._dynamo"
INDEXING = "torch._dynamo._trace_wrapped_higher_order_op"
MODULES = (
    "transformers.conversion_mapping",
    "transformers.modeling_utils",
    "transformers.generation.utils",
    "transformers.integrations.moe",
)
ABSENT = ("is_torch_distributed_available", "is_torch_flex_attn_available")


def import_transformers() -> bool:
    """For the process's first import of it, on its only thread; False where all is imported as usual instead.

    That is where one of them is loaded already, or a version of transformers wants more of the compiler than the
    stand-in has.
    """
    if COMPILER in sys.modules or any(name in sys.modules for name in MODULES):
        return False
    try:
        utils = importlib.import_module("transformers.utils")
        for module in (utils, importlib.import_module("transformers.utils.import_utils")):
            for name in ABSENT:
                setattr(module, name, _never)
        with _without_compiler():
            for name in MODULES:
                importlib.import_module(name)
    except Exception as exc:  # whatever a version of it may stumble over
        logger.warning("transformers is imported with all that it likes to import: %r", exc)
        for name in [name for name in sys.modules if name.partition(".")[0] == "transformers"]:
            del sys.modules[name]
        return False
    return True


def _never() -> bool:
    return False


@contextmanager
def _without_compiler() -> Iterator[None]:
    """torch._dynamo is a stand-in; who imports it later gets the real one."""
    torch: Any = importlib.import_module("torch")
    stand_in: Any = ModuleType(COMPILER)
    stand_in.allow_in_graph = stand_in.assume_constant_result = _unchanged
    stand_in.disable = _undecorated
    indexing: Any = ModuleType(INDEXING)
    indexing.TransformGetItemToIndex = _indexing
    sys.modules |= {COMPILER: stand_in, INDEXING: indexing}
    torch._dynamo = stand_in
    try:
        yield
    finally:
        del sys.modules[COMPILER], sys.modules[INDEXING], torch._dynamo


def _unchanged(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def _indexing() -> Any:
    """What transformers makes masks within, should it ever come to that: the real one."""
    return importlib.import_module(INDEXING).TransformGetItemToIndex()


def _undecorated(function: Callable[..., Any] | None = None, *_: object, **__: object) -> Callable[..., Any]:
    """As a decorator, and as what makes one."""
    return _unchanged if function is None else function


def main() -> None:
    """Runs the module that the command line names, with what follows it there."""
    import_transformers()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
