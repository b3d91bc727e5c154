"""The code hash by which targets take over sessions: all code that computes, without comments and layout."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from bough.model.backend import load
from target_worker.identity import code_hash
from target_worker.identity.code_hash import deciding, meaning, modules, source_of

BACKENDS = ("cpu", "triton", "cublas", "reference")
SEEDS = (
    *(f"bough.model.backends.{name}" for name in BACKENDS),
    "target_worker.sweep.streamed_model",
    "target_worker.verification.verdict",
)
# Modules that a sweep imports and that only find, move, count or name things.
OTHERS = modules(
    ("bough", "errors"),
    ("bough.model", "architecture cpu faults gpu"),
    ("bough.concurrency", "futures"),
    ("bough.config", "cache_paths flag_parser parsers processes reader"),
    ("bough.model.checkpoint",
     "atomic_files checkpoint container gguf_file gguf_tokenizer model_places safetensors_folder"),
    ("bough.model.kv", "arena"),
    ("bough.model.running", "device"),
    ("bough.model.sizes", "memory_budget model_sizes"),
    ("bough.processes", "signals"),
    ("bough.protocol", "cost_curve ids messages prefix_hash"),
    ("bough.runtime", "exit_status host_memory kv_budget machine"),
    ("bough.sizing", "cost_model distinct_experts placement sweep_times"),
    ("bough.telemetry", "spans"),
    ("bough.tokenization", "vocabulary"),
    ("bough.trees", "acceptance scheme_acceptance"),
    ("target_worker.experts", "expert_cache expert_loaders"),
    ("target_worker.kv", "kv_offload slot_index"),
    ("target_worker.link", "device_ring direct_io host_layers layer_extents link_stats streams"),
    ("target_worker.scheduler", "batching job"),
    ("target_worker.sweep", "tiers"),
)  # fmt: skip
SOURCE = b'''"""A module."""
LIMIT = 3


class Row:
    """A class."""

    def double(self, value):
        """Doubles."""
        return value * 2  # a comment
'''


def imported(module: str) -> Iterator[str]:
    """Modules of `bough` and `target_worker` that a module imports, also within its functions."""
    for node in ast.walk(ast.parse(source_of(module).read_text())):
        names = []
        if isinstance(node, ast.ImportFrom):
            names = [str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            if name.split(".")[0] in ("bough", "target_worker") and source_of(name).is_file():
                yield name


def test_every_module_that_a_sweep_imports_is_declared_to_decide_bits_or_not() -> None:
    seen: set[str] = set()
    waiting = list(SEEDS)
    while waiting:
        module = waiting.pop()
        if module not in seen:
            seen.add(module)
            waiting += imported(module)
    decides = frozenset[str]().union(*(deciding(load(name)) for name in BACKENDS))
    assert seen - decides - OTHERS == set(), "does it decide bits? `deciding` has what does, and OTHERS what does not"
    assert not decides & OTHERS
    assert all(source_of(module).is_file() for module in decides | OTHERS)
    assert set(SEEDS) <= decides


def test_a_backend_only_decides_its_own_bits() -> None:
    cpu, triton = deciding(load("cpu")), deciding(load("triton"))
    assert "bough.model.cpu.linear" in cpu - triton
    assert "bough.model.gpu.unpack_triton" in triton - cpu
    assert deciding(load("cublas")) - triton == {"bough.model.backends.cublas"}, "it has all else from the other"
    assert {"bough.model.quant.awq", "bough.model.architecture.moe"} <= cpu & triton


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"A module.", b"Another."),
        (b"# a comment", b"# more"),
        (b"Doubles.", b"Twice."),
        (b"LIMIT = 3", b"\n\nLIMIT = 3"),
    ],
)
def test_comments_and_positions_do_not_change_the_hash(old: bytes, new: bytes) -> None:
    assert old in SOURCE
    assert meaning(SOURCE.replace(old, new)) == meaning(SOURCE)


@pytest.mark.parametrize(("old", "new"), [(b"* 2", b"* 3"), (b"LIMIT = 3", b"LIMIT = 4"), (b"value * 2", b"2 * value")])
def test_another_number_or_order_changes_the_hash(old: bytes, new: bytes) -> None:
    assert old in SOURCE
    assert meaning(SOURCE.replace(old, new)) != meaning(SOURCE)


def test_the_hash_is_cached_for_the_next_start_and_computed_again_for_changed_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BOUGH_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(code_hash, "ROOT", tmp_path / "repository")
    monkeypatch.setattr(code_hash, "deciding", lambda _: frozenset({"target_worker.verification.verdict"}))
    file = tmp_path / "repository" / "target_worker" / "verification" / "verdict.py"
    file.parent.mkdir(parents=True)

    def found(content: bytes) -> str:
        code_hash.code_hash.cache_clear()
        file.write_bytes(content)
        return code_hash.code_hash(load("cpu"))

    first = found(SOURCE)
    assert found(SOURCE.replace(b"Doubles.", b"Twice.")) == first
    assert found(SOURCE.replace(b"* 2", b"* 3")) != first
    assert len(list((tmp_path / "code").iterdir())) == 3
    monkeypatch.setattr(code_hash, "meaning", None)
    assert found(SOURCE) == first, "read, not parsed"
    code_hash.code_hash.cache_clear()
