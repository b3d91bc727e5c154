"""Keys and values in a slot's memory as arrays, for compiled code."""

from __future__ import annotations

from typing import Any

from numba import carray  # type: ignore[attr-defined]
from numba.core import types
from numba.extending import intrinsic

from bough.model.cpu.jit import strict_inner


def _typed_pointer(_context: Any, address: Any, kind: Any, index: Any) -> Any:
    """Pointer to entry `index` of an array of the type of `kind` at `address`."""
    signature = types.CPointer(kind)(address, kind, index)

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        first = builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))
        return builder.gep(first, [arguments[2]])

    return signature, codegen


_pointer: Any = intrinsic(_typed_pointer)


@strict_inner
def layer_rows(address: Any, kind: Any, layer: Any, num_rows: Any, num_kv_heads: Any, width: Any) -> Any:
    """A slot's keys or values of one layer, (num_rows, num_kv_heads, width), of the type of the number `kind`."""
    first = _pointer(address, kind, layer * num_rows * num_kv_heads * width)
    return carray(first, (num_rows, num_kv_heads, width))
