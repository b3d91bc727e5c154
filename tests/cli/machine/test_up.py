"""`bough up` opens both APIs and prints how to call them."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from bough.cli.machine.up import (
    ports_of,
    require_models,
    settings_from,
    target_lines,
    up,
)
from bough.cli.main import argument_parser
from bough.client import Client
from bough.config.addresses import free_port, require_free_ports
from bough.config.processes import TargetConfig
from bough.errors import CheckpointError, ConfigError, PairingError
from bough.processes.demonstration import ensure_demonstration
from bough.processes.exit_with_parent import MODULE
from bough.protocol.generation import ServerInfo, WorkerInfo, WorkerStatus
from tests.fakes.processes.bough_up import bough_up_command
from tests.fakes.simulated import write_profile


@contextmanager
def bough_up(*flags: str) -> Iterator[subprocess.Popen[str]]:
    """The command as a user runs it; it ends with the block."""
    process = subprocess.Popen(bough_up_command(*flags), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        yield process
    finally:
        process.terminate()
        process.communicate()


@pytest.mark.pipeline
def test_the_printed_command_works_when_pasted_and_doctor_names_the_address(tmp_path: Path) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    with bough_up("--simulate", str(write_profile(tmp_path))) as process:
        assert process.stdout is not None
        address = ""
        for line in process.stdout:
            if line.startswith("ready: "):
                address = line.split()[1]
            if line.startswith("every sweep moves "):
                moved = line
            if line.startswith("in a browser: "):
                page = line.split()[-1]
            if line.startswith("curl "):
                break
        ran = subprocess.run(f"{line.strip()} --silent", shell=True, capture_output=True, text=True, check=True)
        answer = json.loads(ran.stdout)
        assert answer["choices"][0]["finish_reason"] in ("stop", "length")  # simulated text may end at once
        assert answer["usage"]["completion_tokens"] <= 64
        url = line.split()[1].removesuffix("/chat/completions")
        assert page == url.removesuffix("/v1") + "/ui"
        assert moved == "every sweep moves 0.40 GB of layers\n"
        doctor = [sys.executable, *MODULE, "bough.cli.main", "doctor", "--address", address]
        assert f"OpenAI's clients at {url}\n" in subprocess.run(doctor, capture_output=True, text=True).stdout


def test_up_uses_the_usual_port_another_one_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def port(*flags: str) -> int:
        arguments = argument_parser().parse_args(["up", "--simulate", "two-cores", *flags])
        return settings_from(arguments).orchestrator.http_port

    assert port("--http-port", "8123") == 8123
    assert port("--http-port", "-1") == -1
    assert port() > 0, "settled before the start, so that it stays after a restart"
    monkeypatch.setenv("BOUGH_ORCHESTRATOR_HTTP_PORT", "8124")
    assert port() == 8124
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        number = taken.getsockname()[1]
        assert free_port("127.0.0.1", number) not in (0, number)
    assert free_port("127.0.0.1", number) == number


def test_ports_can_come_from_the_environment_and_must_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """The usual port for HTTP was taken although gRPC had been given it."""
    up = argument_parser().parse_args(["up", "--simulate", "two-cores"])
    assert settings_from(up).orchestrator.port == 7411
    monkeypatch.setenv("BOUGH_ORCHESTRATOR_PORT", "8000")
    orchestrator = settings_from(up).orchestrator
    assert orchestrator.port == 8000
    assert orchestrator.http_port not in (0, 8000)
    other = argument_parser().parse_args(["up", "--simulate", "two-cores", "--port", "9000"])
    assert settings_from(other).orchestrator.port == 9000


def test_a_port_in_use_is_named_before_anything_starts() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        number = str(taken.getsockname()[1])
        for flags in (("--port", number), ("--port", "0", "--http-port", number)):
            arguments = argument_parser().parse_args(["up", "--simulate", "two-cores", *flags])
            message = f"^{flags[-2]}: must be a free port .*, got {number} .Address already in use.$"
            with pytest.raises(ConfigError, match=message):
                require_free_ports("127.0.0.1", ports_of(settings_from(arguments).orchestrator))
    same = argument_parser().parse_args(["up", "--simulate", "two-cores", "--port", number, "--http-port", number])
    with pytest.raises(ConfigError, match=f"^--http-port: must be another port than --port, got {number} for both$"):
        require_free_ports("127.0.0.1", ports_of(settings_from(same).orchestrator))
    arguments = argument_parser().parse_args(["up", "--simulate", "two-cores", "--port", "0", "--http-port", "-1"])
    require_free_ports("127.0.0.1", ports_of(settings_from(arguments).orchestrator))


def test_a_missing_model_is_reported_with_its_flag(tiny: Path, tmp_path: Path) -> None:
    """A worker would end, and its log would name its own setting, `model`, whichever of the two it was."""
    nowhere = str(tmp_path / "nowhere")
    for flags, message in (
        (("--target", nowhere, "--draft", "none"), f"--target: must be a folder .*, got {nowhere}"),
        (("--target", str(tiny), "--draft", str(tmp_path)), f"--draft: must be a Hugging Face .*, got {tmp_path}"),
        (("--target", str(tiny), "--draft", nowhere), f"--draft: must be a folder .*, got {nowhere}"),
    ):
        settings = settings_from(argument_parser().parse_args(["up", *flags]))
        with pytest.raises(CheckpointError, match=f"^{message}"):
            require_models(settings)


def test_up_starts_the_target_in_as_many_stages_as_are_asked_for(tiny: Path) -> None:
    def target_of(*flags: str) -> TargetConfig:
        return settings_from(argument_parser().parse_args(["up", *flags])).target

    model = "--target", str(tiny), "--draft", "none"
    assert [target_of(*model, *flags).stages for flags in ((), ("--stages", "2"))] == [1, 2]
    with pytest.raises(ConfigError, match=r"^--stages: must be a whole number, 1 or more, got '0'$"):
        target_of(*model, "--stages", "0")
    with pytest.raises(ConfigError, match=r"^--stages: must not be given with --simulate, which has no model, got 2$"):
        target_of("--simulate", "two-cores", "--stages", "2")


async def refusal(*flags: str) -> str:
    """The error of `bough up`, which must come before anything is written or started."""
    with pytest.raises((ConfigError, PairingError)) as refused:
        await up(argument_parser().parse_args(["up", "--port", "0", "--http-port", "-1", *flags]))
    return str(refused.value)


async def test_memory_that_does_not_exist_is_refused_at_once_with_its_flag(tiny: Path) -> None:
    """--device-memory was named, after 13 seconds."""
    models = "--target", str(tiny), "--draft", "none"
    assert re.match(
        "--kv-memory: must be less than .*, got 900000.00 GB", await refusal(*models, "--kv-memory", "900000GB")
    )
    problem = await refusal(*models, "--device-memory", "1GB", "--kv-memory", "2GB")
    assert problem.startswith("--kv-memory: must be less than the 1.00 GB for weights, KV and activations, ")


@pytest.mark.parametrize("target", ["tiny", "demonstration"])
async def test_memory_for_no_session_is_refused_before_a_model_is_written_or_read(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    """A worker said so in its log, after its start."""
    monkeypatch.setenv("BOUGH_CACHE_DIR", str(tmp_path))
    model = ("--target", str(tiny), "--draft", "none") if target == "tiny" else ()
    problem = await refusal(*model, "--kv-memory", "10")
    assert re.match(r"--kv-memory: must be at least \d+ bytes, for one token and a tree of 512 nodes, got 10$", problem)
    assert not list(tmp_path.glob("*")), "nothing was written"


@pytest.mark.parametrize("flags", [("--simulate", "two-cores"), ("--draft", "none")])
async def test_unusable_files_are_named_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...]
) -> None:
    """The orchestrator named them in its log, after the workers had started."""
    nowhere = str(tmp_path / "nowhere")
    with monkeypatch.context() as changed:
        changed.setenv("BOUGH_ORCHESTRATOR_KEYS", nowhere)
        problem = f"--keys (BOUGH_ORCHESTRATOR_KEYS): {nowhere} must be a readable file, got: No such file"
        assert (await refusal(*flags)).startswith(problem)
        (tmp_path / "nowhere").write_text("no key\n")
        (tmp_path / "nowhere").chmod(0o600)
        assert "nowhere, line 1: must be a JSON object" in await refusal(*flags)
    monkeypatch.setenv("BOUGH_WORKER_KEY_FILE", str(tmp_path / "secret"))
    assert (await refusal(*flags)).startswith("--worker-key-file")


async def test_a_draft_that_does_not_fit_is_refused_before_a_model_is_written(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was found by a worker, which named the other one's address."""
    monkeypatch.setenv("BOUGH_CACHE_DIR", str(tmp_path))
    assert (await refusal("--draft", str(tmp_path / "x"))).startswith("--draft: must be a folder ")
    problem = await refusal("--draft", str(tiny))
    assert re.match(f"--draft: {tiny} must have the tokenizer of .*: token \\d+ is '.*' in the draft and '", problem)
    assert not list(tmp_path.glob("*")), "nothing was written"


def test_disk_space_for_the_demonstration_is_checked_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BOUGH_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(3 * 10**9, 10**9, 2 * 10**9))
    with pytest.raises(ConfigError, match=r"2.3 GB are needed and 2.0 GB are free; set BOUGH_CACHE_DIR"):
        ensure_demonstration()


class Informed:
    """A client of an orchestrator with one target."""

    def __init__(self, info: WorkerInfo) -> None:
        self._info = info

    async def __aenter__(self) -> Informed:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def server_info(self) -> ServerInfo:
        return ServerInfo((WorkerStatus("h:1", self._info, ""),), "", "", 1, "")


async def test_the_longest_session_is_reported_with_its_limit_and_an_impossible_limit_is_refused() -> None:
    info = WorkerInfo("target", "w", "m", "d", "f", "t", 262, 5632, 512, 1, context_limit="--kv-memory of the target")
    lines = await target_lines(cast(Client, Informed(info)), "m")
    assert lines[:1] == ["context: 5632 tokens of prompt and answer, limited by --kv-memory of the target"]
    note = "--max-context: 9000 is more than the model's own limit, 5632, which applies"
    info = replace(info, context_limit="", notes=("another", note))
    lines = await target_lines(cast(Client, Informed(info)), "m")
    assert lines[:2] == ["context: 5632 tokens of prompt and answer", f"warning: {note}"]
