"""llama.cpp's own server, from the package `xllamacpp`, for `loadtest.peers.llama_cpp`.

    python -P loadtest/peers/llama_cpp_server.py '{"model": "a.gguf", "draft": "", "threads": 2, ...}'

This file imports nothing of bough, because the Python that runs it may have only `xllamacpp` installed. It prints one
JSON line once the model is loaded, with `address` for HTTP requests, and ends at the end of its standard input, and so
with its parent.
"""

from __future__ import annotations

import json
import os
import sys
from importlib.metadata import version
from typing import Any

import xllamacpp


def parameters(settings: dict[str, Any]) -> Any:
    """llama.cpp's parameters for one session at a time: its defaults, changed by the settings."""
    params = xllamacpp.CommonParams()
    params.model.path = settings["model"]
    params.n_ctx = settings["context"]
    params.n_ubatch = settings["ubatch"]
    params.n_parallel = 1
    params.load_mode = xllamacpp.llama_load_mode.LLAMA_LOAD_MODE_MMAP
    params.fit_params = False  # would change the requested sizes
    params.cache_ram_mib = 0  # a prompt cache would take memory from weights
    params.ui = False
    for cpu in (params.cpuparams, params.cpuparams_batch):
        cpu.n_threads = settings["threads"]
    if settings["draft"]:
        params.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE]
        draft = params.speculative.draft
        draft.mparams.path = settings["draft"]
        draft.n_max = settings["draft_tokens"]
        for cpu in (draft.cpuparams, draft.cpuparams_batch):
            cpu.n_threads = settings["threads"]
    return params


def main() -> None:
    """Serve until the end of standard input."""
    server = xllamacpp.Server(parameters(json.loads(sys.argv[1])))
    ready = {
        "address": server.listening_address,
        "version": version("xllamacpp"),
        "system_info": xllamacpp.get_system_info().strip(),
    }
    print(json.dumps(ready), flush=True)
    sys.stdin.read()
    os._exit(0)  # freeing memory would take seconds


if __name__ == "__main__":
    main()
