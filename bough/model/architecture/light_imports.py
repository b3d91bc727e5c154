"""Imports transformers' modelling code without torch's compiler and distributed tensors.

    python -m bough.model.architecture.light_imports MODULE ARGUMENTS...    then runs MODULE like `python -m`

The import pulls in torch._dynamo, the inductor, sympy and torch.distributed.tensor, for decorators that only matter to
`torch.compile` and for tensors spread over processes. Workers use neither; they took a third of the import time and
140 MB. So while transformers is imported, torch._dynamo is a stub whose decorators do nothing, and torch appears to be
built without torch.distributed and flex attention, as some builds are. Amazon's boto3, which accelerate imports if it
is installed, is hidden meanwhile.
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
HIDDEN = "boto3"
ABSENT = ("is_torch_distributed_available", "is_torch_flex_attn_available")


def import_transformers() -> bool:
    """Import transformers for the first time, on the process's only thread; False if all is imported as usual instead.

    That is the case if one of the modules is loaded already, or if this version of transformers needs more of the
    compiler than the stub has.
    """
    if COMPILER in sys.modules or any(name in sys.modules for name in MODULES):
        return False
    try:
        utils = importlib.import_module("transformers.utils")
        for module in (utils, importlib.import_module("transformers.utils.import_utils")):
            for name in ABSENT:
                setattr(module, name, _never)
        with _without_compiler(), _hidden():
            for name in MODULES:
                importlib.import_module(name)
    except Exception as exc:  # versions of transformers differ
        logger.warning("transformers is imported with torch's compiler: %r", exc)
        for name in [name for name in sys.modules if name.partition(".")[0] == "transformers"]:
            del sys.modules[name]
        return False
    return True


def _never() -> bool:
    return False


@contextmanager
def _without_compiler() -> Iterator[None]:
    """Replace torch._dynamo by a stub; later importers get the real one."""
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


@contextmanager
def _hidden() -> Iterator[None]:
    """Make `import boto3` fail during the block as if it were not installed."""
    if HIDDEN in sys.modules:
        yield
        return
    missing: Any = None  # the import system's mark of a missing module
    sys.modules[HIDDEN] = missing
    try:
        yield
    finally:
        sys.modules.pop(HIDDEN, None)


def _unchanged(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def _indexing() -> Any:
    """The real context in which transformers makes masks, if it is needed."""
    return importlib.import_module(INDEXING).TransformGetItemToIndex()


def _undecorated(function: Callable[..., Any] | None = None, *_: object, **__: object) -> Callable[..., Any]:
    """A no-op decorator, and decorator factory."""
    return _unchanged if function is None else function


def main() -> None:
    """Run the module that the command line names, with its arguments."""
    import_transformers()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
