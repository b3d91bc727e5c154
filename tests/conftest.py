"""Models that the tests make themselves, and a pipeline of real processes."""

from __future__ import annotations

import gc

gc.disable()  # until all tests are known: looking through what is only imported takes a quarter of the time of that

import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from bough.config import addresses
from bough.config.cache_paths import demonstration_folder
from bough.config.processes import DraftConfig, OrchestratorConfig, TargetConfig, parse
from bough.model.checkpoint.model_places import load_tokenizer_files
from bough.processes.demonstration import ensure_demonstration
from bough.processes.launch import Cluster, Settings, launched
from bough.tokenization.vocabulary import TokenizerFiles
from loadtest.common.tiny_tokenizer import save_tokenizer
from tests.fakes.fleet import Fleet, fleet
from tests.fakes.processes.fork_server import ForkServer, forked_programs
from tests.fakes.stage import Orchestrator, Stage, orchestrating, staged_at
from tests.fakes.torch_imports import import_torch

TESTS = Path(__file__).parent
FORK_SERVER = pytest.StashKey[ForkServer]()
FOLDERS = {"pipeline": "pipeline", "clients": "pipeline", "loadtest": "pipeline"}  # kinds of tests; others are units
PROCESSES = {"tiny_cluster", "smollm"}  # fixtures of real processes and real models
# Folders whose modules load no torch, which takes seconds and 200 MB; tests/test_layout.py checks it.
WITHOUT_TORCH = {
    *("client", "clients", "concurrency", "config", "deploy", "grammar", "orchestrator", "processes", "protocol"),
    *("registry", "rpc", "runtime", "security", "simulator", "sizing", "telemetry", "tokenization", "trees"),
}

# Tests are deterministic: examples are the same in every run; --hypothesis-profile=default draws others.
hypothesis.settings.register_profile(
    "patient", deadline=None, derandomize=True, max_examples=40, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("patient")

# Ports are drawn at random: each process of pytest has its own part of them, or two tests might get the same one.
addresses.PORTS = addresses.PORTS[
    int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) :: int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Where units alone are asked for, folders that have none are not imported: they are every seventh module."""
    asked = config.option.markexpr
    if asked.split()[:1] == ["unit"] and " or " not in asked and collection_path.parent == TESTS:
        return collection_path.name in FOLDERS or None
    return None


def pytest_collect_file(file_path: Path) -> None:
    """Other folders have torch and transformers imported as workers import them, before a module imports more of it."""
    folder, *rest = file_path.relative_to(TESTS).parts
    if rest and folder not in WITHOUT_TORCH:
        import_torch()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks each test by its kind: `make test-fast` runs the units that are not slow.

    Those of faults come first: they wait for most of their time, in which processors compute what comes after them.
    """
    items.sort(key=lambda item: item.get_closest_marker("chaos") is None)
    for item in items:
        kinds = {mark.name for mark in item.iter_markers()} & {"pipeline", "chaos", "cluster"}
        if kinds:
            continue
        kind = FOLDERS.get(item.path.relative_to(TESTS).parts[0], "unit")
        item.add_marker("pipeline" if PROCESSES & set(getattr(item, "fixturenames", ())) else kind)


def pytest_collection_finish() -> None:
    """From now on garbage is looked for, but not among modules and tests: they stay to the end."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """All processes of pytest share one that forks."""
    if FORK_SERVER not in node.config.stash:
        node.config.stash[FORK_SERVER] = server = ForkServer()
        node.config.add_cleanup(server.close)
    node.workerinput["fork_server"] = node.config.stash[FORK_SERVER].address


@pytest.fixture(scope="session", autouse=True)
def _forked_programs(request: pytest.FixtureRequest) -> Iterator[None]:
    address = getattr(request.config, "workerinput", {}).get("fork_server")
    with forked_programs(address, any(item.get_closest_marker("unit") is None for item in request.session.items)):
        yield


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of four layers in several shards."""
    import_torch()
    from loadtest.common.tiny_model import TINY, save_model

    return save_model(tmp_path_factory.mktemp("models") / "tiny", TINY)


@pytest.fixture(scope="session")
def smollm() -> Path:
    """SmolLM2-135M-Instruct as it is, from the user's cache."""
    ensure_demonstration(0)
    return demonstration_folder(0)


def settings(
    target: Path, draft: Path | None, *flags: str, drops: str = "", orchestrator: tuple[str, ...] = ()
) -> Settings:
    """A pipeline on free ports; `flags` are for the target."""
    threads = ["--threads", str(os.cpu_count() or 1)]
    target_flags = ["--model", str(target), "--dtype", "float32", "--resident-layers", "0"]
    draft_flags = ["--model", str(draft), "--drop-layers", drops, *threads]
    return Settings(
        target=parse(TargetConfig, "t", [*target_flags, *threads, *flags], {}),
        draft=parse(DraftConfig, "d", draft_flags, {}) if draft else None,
        orchestrator=parse(OrchestratorConfig, "o", ["--port", "0", *orchestrator], {}),
    )


@asynccontextmanager
async def pipeline(config: Settings) -> AsyncIterator[Cluster]:
    """Real processes, ended with the test."""
    async with launched(config, lambda _: None) as cluster:
        yield cluster


@pytest.fixture(scope="session")
async def tiny_cluster(tiny: Path) -> AsyncIterator[Cluster]:
    """The tiny model served, with itself less one layer as the draft. For tests that leave it standing."""
    async with pipeline(settings(tiny, tiny, "--max-nodes", "32", drops="2")) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def byte_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TokenizerFiles:
    """That of `save_tokenizer`."""
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(folder)
    return load_tokenizer_files(folder)


@pytest.fixture(scope="session")
def index_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An index without any process around it; each user chooses a namespace."""
    nothing = Settings(parse(TargetConfig, "t", ["--model", "x"], {}), None, parse(OrchestratorConfig, "o", [], {}))
    cluster = Cluster(nothing, tmp_path_factory.mktemp("index"))
    cluster.start_index()
    yield cluster.index_url
    cluster.stop_all()


@pytest.fixture
async def fakes(index_url: str, byte_tokenizer: TokenizerFiles, request: pytest.FixtureRequest) -> AsyncIterator[Fleet]:
    """No record yet, in the test's own namespace."""
    async with fleet(index_url, byte_tokenizer, request.node.nodeid) as running:
        yield running


@pytest.fixture
async def stage(index_url: str, tmp_path: Path) -> AsyncIterator[Stage]:
    """A fake target that is registered in the index, in a namespace of the test's own."""
    async with staged_at(index_url, tmp_path.name) as stage:
        yield stage


@pytest.fixture
async def orchestrator(stage: Stage) -> AsyncIterator[Orchestrator]:
    """One before the fake target."""
    async with orchestrating(stage) as orchestrator:
        yield orchestrator
