"""Has numba make machine code only of functions that Python calls, or whose address it takes.

On its own numba optimises every function together with all that it calls, and makes machine code of both. A function at
the bottom of five calls then goes through LLVM five times, and all but the last result are thrown away: more than half
of the time that kernels took to compile. Here what only compiled code calls stays as it is until a function that needs
machine code takes it in, once, and is optimised as a whole.

This replaces a class within numba, so it is done only with the version that it was tried with; others compile in their
own way, which takes longer.
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
    """A compiled function, which gets its machine code when that is first asked for."""

    _has_code = False

    def _optimize_functions(self, ll_module: Any) -> None:
        """Optimises nothing yet: that follows when all is linked."""
        ll_module.data_layout = self._codegen._data_layout

    def finalize(self) -> None:
        """Ends what may be added; links and optimises nothing yet."""
        self._raise_if_finalized()
        self._finalized = True

    def _finalize_final_module(self) -> None:
        """Makes the machine code, or loads it where a cache had it."""
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
        """All that it calls, each after what that calls in turn: LLVM links only functions that are wanted already."""
        for library in self._linking_libraries:
            if library not in found:
                found[library] = None  # calls in a circle end here
                if isinstance(library, _Library) and not library._has_code:
                    library._callees(found)
                found[library] = found.pop(library)
        return found

    def _alone(self) -> Any:
        """Its LLVM module, which may be linked into many; with what it calls only where it has machine code."""
        if self._has_code:
            return self._get_module_for_linking()
        if self._shared_module is None:
            self._shared_module = self._final_module.clone()
            for function in self._shared_module.functions:
                if not function.is_declaration and function.linkage == Linkage.external:
                    function.linkage = "linkonce_odr"
        return self._shared_module

    def get_pointer_to_function(self, name: str) -> Any:
        """Its address, for which there must be machine code; 0 where the function is not its own."""
        self._ensure_finalized()
        if not self._has_code and not any(function.name == name for function in self.get_defined_functions()):
            return 0
        self._make_code()
        return super().get_pointer_to_function(name)

    @property
    def has_dynamic_globals(self) -> bool:
        """Whether it may not be kept in a cache."""
        self._make_code()
        return bool(super().has_dynamic_globals)

    def _get_compiled_object(self) -> Any:
        self._make_code()
        return super()._get_compiled_object()


class _Codegen(JITCPUCodegen):
    _library_class = _Library

    def set_env(self, env_name: str, env: Any) -> None:
        """Tells machine code where it finds what is Python's; without machine code there is nothing to tell."""
        if self._engine.is_symbol_defined(env_name):
            super().set_env(env_name, env)


class Inner(CPUDispatcher):
    """A function that is compiled for compiled ones alone."""

    def __call__(self, *arguments: Any) -> Any:
        """Runs it as Python does; numba's own class would end the process."""
        return self.py_func(*arguments)


def make_code_late() -> None:
    """For all that this process compiles from now on."""
    codegen = cpu_target.target_context.codegen()
    if numba.version_info.short == TRIED_VERSION and not isinstance(codegen, _Codegen):
        codegen.__class__ = _Codegen
        codegen._engine.set_object_cache(_Library._object_compiled_hook, _Library._object_getbuffer_hook)
