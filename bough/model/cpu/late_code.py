"""Makes numba generate machine code only for functions that Python calls or whose address is taken.

By default numba optimises every function together with its callees, and generates machine code for each. A function at
the bottom of five calls then goes through LLVM five times, and all but the last result are discarded: more than half
of the kernels' compile time. Here functions called only by compiled code stay unoptimised until a function that needs
machine code links them, once, and is optimised as a whole.

This replaces a class inside numba, so it is used only with the version that it was tested with; with other versions
compilation takes longer.
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from typing import Any

import numba
from llvmlite.binding import Linkage
from numba.core.codegen import JITCodeLibrary, JITCPUCodegen
from numba.core.registry import CPUDispatcher, cpu_target

TRIED_VERSION = (0, 68)


class _Library(JITCodeLibrary):
    """A compiled function that gets its machine code when it is first needed."""

    _has_code = False

    def _optimize_functions(self, ll_module: Any) -> None:
        """Optimise nothing yet: that follows after linking."""
        ll_module.data_layout = self._codegen._data_layout

    def finalize(self) -> None:
        """Close the library for additions; link and optimise nothing yet."""
        self._raise_if_finalized()
        self._finalized = True

    def _finalize_final_module(self) -> None:
        """Generate machine code, or load it from the cache."""
        self._has_code = True
        super()._finalize_final_module()

    def _make_code(self) -> None:
        if self._has_code:
            return
        self._ensure_finalized()
        for library in reversed(self._callees({})):
            self._reload_init.update(library._reload_init)
            own = library._alone() if isinstance(library, _Library) else library._get_module_for_linking()
            self._final_module.link_in(own, preserve=True)
        self._shared_module = None
        self._optimize_final_module()
        self._final_module.verify()
        self._finalize_final_module()

    def _callees(self, found: dict[Any, None]) -> dict[Any, None]:
        """All callees, each before its own callees: LLVM links only functions that are already referenced."""
        for library in self._linking_libraries:
            if library not in found:
                found[library] = None  # ends recursion at cycles
                if isinstance(library, _Library) and not library._has_code:
                    library._callees(found)
                found[library] = found.pop(library)
        return found

    def _alone(self) -> Any:
        """The LLVM module, linkable into many others; with its callees only if it has machine code."""
        if self._has_code:
            return self._get_module_for_linking()
        if self._shared_module is None:
            self._shared_module = self._final_module.clone()
            for function in self._shared_module.functions:
                if not function.is_declaration and function.linkage == Linkage.external:
                    function.linkage = "linkonce_odr"
        return self._shared_module

    def get_pointer_to_function(self, name: str) -> Any:
        """Address of a function, after generating machine code; 0 if the library does not define it."""
        self._ensure_finalized()
        if not self._has_code and not any(function.name == name for function in self.get_defined_functions()):
            return 0
        self._make_code()
        return super().get_pointer_to_function(name)

    @property
    def has_dynamic_globals(self) -> bool:
        """Whether the code depends on addresses of this process, and cannot be cached."""
        self._make_code()
        return bool(super().has_dynamic_globals)

    def _get_compiled_object(self) -> Any:
        self._make_code()
        return super()._get_compiled_object()


class _Codegen(JITCPUCodegen):
    _library_class = _Library

    def set_env(self, env_name: str, env: Any) -> None:
        """Set the environment pointer of a function, if it has machine code."""
        if self._engine.is_symbol_defined(env_name):
            super().set_env(env_name, env)


class Inner(CPUDispatcher):
    """A function compiled only for calls from compiled code."""

    def __call__(self, *arguments: Any) -> Any:
        """Run the Python function; numba's class would crash without the wrapper."""
        return self.py_func(*arguments)


def make_code_late() -> None:
    """Enable this for all further compilation in the process."""
    codegen = cpu_target.target_context.codegen()
    if numba.version_info.short == TRIED_VERSION and not isinstance(codegen, _Codegen):
        codegen.__class__ = _Codegen
        codegen._engine.set_object_cache(_Library._object_compiled_hook, _Library._object_getbuffer_hook)
