"""Calls of the README and the client's page, as pasted: curl, Python and the shell. bough is at its default ports.

In a network namespace of the test's own, so that the ports which the README names are free whatever else runs here.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bough.cli.main import main

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
CLIENT = (ROOT / "docs" / "client.md").read_text()
IN_NAMESPACE = ("nsenter", "--net", "--target")
START_SECONDS = 60.0
CALL_SECONDS = 60.0
MOST_TRIES = 4  # without a seed a text may end before its first word, but not as often
PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
ENVIRONMENT = {**os.environ, "PATH": PATH, "PYTHONPATH": str(ROOT)}


def blocks(language: str) -> list[str]:
    """Code in a language of the README, then of the client's page, as it would be copied."""
    return re.findall(rf"^```{language}\n(.*?)^```$", README + CLIENT, re.DOTALL | re.MULTILINE)


def can_make_namespaces() -> bool:
    tools = all(shutil.which(tool) for tool in ("unshare", "nsenter", "ip", "curl"))
    return tools and subprocess.run(["unshare", "--net", "true"], capture_output=True).returncode == 0


@pytest.fixture(scope="module")
def namespace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The id of a process in a network namespace where `bough up` serves without weights at its default ports."""
    if not can_make_namespaces():
        pytest.skip("no network namespaces here, or no curl")
    log = tmp_path_factory.mktemp("readme") / "up.log"
    command = "ip link set lo up && exec bough up --simulate l40-70b-4bit"
    with log.open("w") as file:
        process = subprocess.Popen(
            ["unshare", "--net", "bash", "-c", command], stdout=file, stderr=subprocess.STDOUT, env=ENVIRONMENT
        )
    try:
        deadline = time.monotonic() + START_SECONDS
        while "ready:" not in log.read_text():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)
        yield str(process.pid)
    finally:
        process.terminate()
        process.wait(30)


def pasted(namespace: str, *command: str, typed: str = "") -> str:
    """Output of a command run while the server runs."""
    done = subprocess.run(
        [*IN_NAMESPACE, namespace, *command],
        input=typed, capture_output=True, text=True, timeout=CALL_SECONDS, env=ENVIRONMENT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.pipeline
def test_curl_of_the_readme_is_answered(namespace: str) -> None:
    (block,) = blocks("bash")
    answer = pasted(namespace, "bash", "-c", block)
    assert re.search(r'"finish_reason": ?"(length|stop)"', answer), answer


@pytest.mark.pipeline
@pytest.mark.parametrize("number", range(2), ids=["openai", "grpc"])
def test_python_of_the_readme_is_answered(namespace: str, number: int) -> None:
    block = blocks("python")[number]
    if "from openai" in block:
        pytest.importorskip("openai")
    assert any(pasted(namespace, sys.executable, "-c", block).strip() for _ in range(MOST_TRIES))


@pytest.mark.pipeline
def test_shell_commands_of_the_readme_work(namespace: str) -> None:
    """Those that ask a running bough; each is the README's own line."""
    for name in ("generate", "chat", "doctor", "explain"):
        line, typed = line_of(name), "Hello\n" if name == "chat" else ""
        tries = MOST_TRIES if name in ("generate", "chat") else 1
        assert any(pasted(namespace, "bash", "-c", line, typed=typed).strip() for _ in range(tries)), name


def line_of(command: str) -> str:
    """A command as the README has it first, without the comment behind it."""
    found = re.search(rf"bough {command} [^`\n]*", README)
    assert found
    return found[0].split("  ")[0]


@pytest.mark.parametrize(
    ("command", "more", "expected"),
    [
        (
            "plan",
            "--device-memory 24GB --host-memory 128GB --host-link-speed 25 --compute-speed 80 --json",
            "tokens_per_second",
        ),
        pytest.param("simulate", "--no-purchases", "10", marks=pytest.mark.long),
    ],
)
def test_commands_that_need_no_server_work(
    command: str, more: str, expected: str, tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a model in place of FOLDER, and what makes each quick: speeds that are given, and no purchases."""
    line = line_of(command).replace("FOLDER", str(tiny))
    with pytest.raises(SystemExit, match="0"):
        main(shlex.split(f"{line} {more}")[1:])
    assert expected in "".join(capsys.readouterr())


def test_pages_linked_in_the_readme_exist() -> None:
    for name in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / name).exists(), name


def test_make_targets_named_in_the_readme_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for name in re.findall(r"^make (\w+)", README, re.MULTILINE):
        assert re.search(rf"^{name}:", makefile, re.MULTILINE), name
