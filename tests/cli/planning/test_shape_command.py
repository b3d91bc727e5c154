"""`bough shape`: one JSON line from a file or from a running system, a plot, and errors that name what is wrong."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from bough.cli.main import argument_parser, main
from bough.cli.planning.shape import shape
from bough.client import Client
from bough.protocol.generation import Finished, GenerateOptions, Speculation, TextPrompt
from bough.trees.acceptance import acceptance_from
from bough.trees.optimal_tree import expected_tokens
from bough.trees.scheme_acceptance import DepthCounts, SchemeAcceptance
from bough.trees.tree_plan import Scheme, StaticShape
from loadtest.common.tiny_model import SMALLEST, save_model
from tests.fakes.stack import stack

DATA = Path(__file__).parents[3] / "loadtest" / "data"
MEASURED = str(DATA / "acceptance-measured.json")


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    """What `bough shape` prints."""
    with pytest.raises(SystemExit) as ended:
        main(["shape", *argv])
    output = capsys.readouterr()
    assert ended.value.code == 0, output.err
    (line,) = output.out.splitlines()
    return dict(json.loads(line))


def refused(capsys: pytest.CaptureFixture[str], *argv: str, status: int = 2) -> str:
    """The one line on standard error."""
    with pytest.raises(SystemExit) as ended:
        main(["shape", *argv])
    assert ended.value.code == status
    (line,) = capsys.readouterr().err.splitlines()
    return str(line)


def test_the_papers_tree_is_reproduced(capsys: pytest.CaptureFixture[str]) -> None:
    report = run(capsys, "--vector", MEASURED, "--nodes", "64", "--levels", "10")
    assert report["expected_tokens"] == pytest.approx(3.8523, abs=5e-5)
    assert report["nodes"] == sum(report["layer_sizes"]) == len(report["parents"]) + 1 == 64
    assert report["levels"] == len(report["layer_sizes"]) <= 10
    acceptance = acceptance_from("measured", json.loads(Path(MEASURED).read_text()))
    assert expected_tokens(StaticShape(tuple(report["parents"])), acceptance) == report["expected_tokens"]
    assert 1 < report["chains"]["expected_tokens"] < report["expected_tokens"]


def test_children_can_be_limited_and_plain_decoding_has_no_chains(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "--vector", MEASURED, "--nodes", "9", "--max-children", "1")["layer_sizes"] == [1] * 9
    report = run(capsys, "--vector", MEASURED, "--nodes", "1")
    assert (report["expected_tokens"], report["layer_sizes"], report["chains"]) == (1.0, [1], None)


def test_acceptance_may_differ_by_depth(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "v.json"
    file.write_text("[[0.5, 0.25], [0.75], [0]]")
    report = run(capsys, "--vector", str(file), "--nodes", "9")
    assert (report["parents"], report["expected_tokens"]) == ([0, 0, 1, 2], 1 + 0.75 * 1.75)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0.5, 0.2", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("\xff", "is not JSON"),
        ("[]", "must be a list of probabilities by rank"),
        ("[0.5, -0.1]", "[1]: must be a probability from 0 to 1, got -0.1"),
        ("[0.5, NaN]", "[1]: must be a probability from 0 to 1, got nan"),
        ("[0.9, 0.2]", "is accepted, got 1.1"),
        ("[[0.5], [0.9, 0.2]]", "[1]: must sum to at most 1"),
        ('["0.5"]', "[0]: must be a probability from 0 to 1, got '0.5'"),
    ],
)
def test_invalid_files_are_refused_by_name(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "v.json"
    file.write_bytes(text.encode("latin-1"))
    error = refused(capsys, "--vector", str(file), "--nodes", "4")
    assert error.startswith("error: --vector: ")
    assert str(file) in error
    assert message in error


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--vector", "nowhere.json", "--nodes", "4"],
            "--vector: must be a JSON file, got nowhere.json, which cannot be read: No such file",
        ),
        (["--vector", str(DATA), "--nodes", "4"], "cannot be read: Is a directory"),
        (["--vector", MEASURED, "--nodes", "0"], "--nodes: must be a whole number, 1 to 4096, got '0'"),
        (["--vector", MEASURED, "--nodes", "5000"], "--nodes: must be a whole number, 1 to 4096, got '5000'"),
        (
            ["--vector", MEASURED, "--nodes", "4", "--levels", "0"],
            "--levels: must be a whole number, 1 to 4096, got",
        ),
        (
            ["--vector", MEASURED, "--nodes", "4", "--max-children", "-1"],
            "--max-children: must be a whole number, 1 to 4096, got",
        ),
        (["--vector", MEASURED, "--nodes", "4", "--by-depth"], "--by-depth: "),
        (["--vector", MEASURED, "--nodes", "4", "--scheme", "target"], "--scheme: must be given with --from-live only"),
    ],
)
def test_invalid_flags_are_named(flags: Sequence[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in refused(capsys, *flags)


def test_from_live_reports_an_address_that_does_not_answer(capsys: pytest.CaptureFixture[str]) -> None:
    problem = refused(capsys, "--from-live", "--nodes", "4", "--address", "127.0.0.1:1", status=1)
    assert "127.0.0.1:1" in problem
    assert "`bough up`" in problem


@pytest.mark.slow
async def test_from_live_uses_the_acceptance_of_a_running_system(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = GenerateOptions(max_tokens=50, temperature=0.0, ignore_eos=True, speculation=Speculation(budget=24))
    draft = save_model(
        tmp_path / "draft", LlamaConfig(**{**SMALLEST.to_dict(), "initializer_range": 0.2})
    )  # seldom right
    async with (
        stack(tmp_path, draft_model=draft) as running,
        Client(address := running.addresses["orchestrator"]) as client,
    ):
        events = [event async for event in client.generate(TextPrompt("hello"), options)]
        assert isinstance(events[-1], Finished)
        live = ["shape", "--from-live", "--address", address, "--nodes", "16", "--levels", "5"]
        for flags, most_rows in ([], 1), (["--by-depth"], 64):
            assert await shape(argument_parser().parse_args([*live, *flags])) == 0
            report = json.loads(capsys.readouterr().out)
            assert 1 < report["expected_tokens"] <= report["levels"] <= 5
            acceptance = acceptance_from("printed", report["acceptance"])
            assert 1 <= len(acceptance) <= most_rows
            assert expected_tokens(StaticShape(tuple(report["parents"])), acceptance) == report["expected_tokens"]


def test_live_counts_give_a_shape(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The second level is always right and the first seldom, which only shows if depths are separated."""
    counts = (DepthCounts((200.0, 100.0), (0.0, 700.0)), DepthCounts((100_000.0, 0.0), (0.0, 0.0)))

    async def acceptance(client: Client) -> tuple[SchemeAcceptance, ...]:
        return (SchemeAcceptance(Scheme.WITHOUT_REPLACEMENT, 9, counts),)

    monkeypatch.setattr(Client, "acceptance", acceptance)
    flags = ["--from-live", "--scheme", "without-replacement", "--nodes", "3", "--levels", "3"]
    assert run(capsys, *flags)["expected_tokens"] > 2.9
    assert run(capsys, *flags, "--by-depth")["expected_tokens"] < 1.7
    assert "measured: without-replacement" in refused(capsys, "--from-live", "--nodes", "4")


def test_ctrl_c_ends_a_computation(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In an event loop the first one would only ask for an end at the next wait, of which there is none."""

    def search(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        pytest.fail("it went on")

    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr("bough.cli.planning.shape.best_shape", search)
    (tmp_path / "vector.json").write_text("[0.6, 0.2]")
    try:
        with pytest.raises(SystemExit, match="130"):
            main(["shape", "--vector", str(tmp_path / "vector.json"), "--nodes", "8"])
    finally:
        signal.signal(signal.SIGINT, before)
