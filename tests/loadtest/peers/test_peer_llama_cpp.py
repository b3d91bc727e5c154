"""The comparison with llama.cpp, without it: what is chosen, scored and reported, from invented answers."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from loadtest.common import limits
from loadtest.peers import llama_cpp as peer_llama_cpp
from loadtest.peers.gguf import Pair
from loadtest.peers.llama_cpp import (
    SAME_WEIGHTS,
    SIDES,
    Bench,
    Prompts,
    Regime,
    best_length,
    differences,
    first_difference,
    geometric_mean,
    halves,
    parse_arguments,
    ratio,
    spread,
    summary,
)
from loadtest.peers.llama_cpp_sides import (
    Answer,
    LlamaServer,
    LlamaSettings,
    PeerError,
    answer_of,
    event_tokens,
    peer_environment,
    require_peer,
    why_unlimited,
)

EOS = (2,)


def test_prompts_for_choosing_are_not_scored() -> None:
    assert halves(5) == ((1, 3), (0, 2, 4))
    assert halves(2) == ((1,), (0,))
    with pytest.raises(ValueError, match=r"prompts: must be at least 2, .*, got 1"):
        halves(1)


def test_the_best_length_is_best_over_all_prompts() -> None:
    assert best_length({4: [1.0, 4.0], 8: [2.2, 2.2], 16: [0.1, 9.0]}) == 8, "by the geometric mean: 2, 2.2, 0.9"
    assert best_length({16: [2.0], 8: [2.0]}) == 8, "of equals the shortest"


@pytest.mark.parametrize("rates", [{}, {4: []}, {4: [1.0, 0.0]}])
def test_lengths_without_rates_are_refused(rates: dict[int, list[float]]) -> None:
    with pytest.raises(ValueError, match="must be at least one"):
        best_length(rates)


def test_ratios_are_paired_by_prompt_and_come_with_an_interval() -> None:
    steady = ratio([2.0, 4.0, 8.0], [1.0, 2.0, 4.0], seed=1)
    assert steady == {"geomean": 2.0, "interval": [2.0, 2.0], "worst": 2.0, "best": 2.0}
    varied = ratio([1.0, 4.0, 2.0, 2.0], [1.0, 1.0, 1.0, 1.0], seed=1)
    assert varied["geomean"] == 2.0
    assert 1.0 <= varied["interval"][0] < 2.0 < varied["interval"][1] <= 4.0
    assert (varied["worst"], varied["best"]) == (1.0, 4.0)
    assert varied == ratio([1.0, 4.0, 2.0, 2.0], [1.0, 1.0, 1.0, 1.0], seed=1)
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        ratio([1.0, 2.0], [1.0], seed=1)
    with pytest.raises(ValueError, match="all above 0"):
        ratio([1.0], [0.0], seed=1)


def test_a_ratio_is_the_quotient_of_two_sides_geometric_means() -> None:
    ours, theirs = [1.0, 4.0, 2.0], [0.5, 1.0, 2.0]
    assert spread(ours) == {"geomean": 2.0, "worst": 1.0, "best": 4.0}
    assert ratio(ours, theirs, seed=1)["geomean"] == spread(ours)["geomean"] / spread(theirs)["geomean"]
    assert geometric_mean([1.0, 4.0]) == pytest.approx(2.0)


def test_texts_are_compared_up_to_their_end() -> None:
    assert first_difference([5, 6, 7], [5, 6, 7], EOS) is None
    assert first_difference([5, 6, 7], [5, 9, 7], EOS) == 1
    assert first_difference([5, 2, 7], [5, 8, 9], EOS) is None, "one side may not take the end, and takes another token"
    assert first_difference([5, 6], [5, 6, 7], EOS) == 2
    texts = {"ours": {0: [5, 6], 1: [7, 8]}, "same": {0: [5, 6], 1: [7, 8]}, "other": {0: [5, 6], 1: [7, 9]}}
    assert differences(texts, "ours", EOS) == {"other": {1: 1}}


def test_an_answers_rate_counts_tokens_after_the_first_event() -> None:
    answer = answer_of([(11.0, [5, 6]), (11.5, []), (12.0, [7]), (13.0, [8, 9, 4])], began=10.0)
    assert answer == Answer((5, 6, 7, 8, 9, 4), first_seconds=1.0, num_first=2, seconds=3.0)
    assert answer.decode_rate == 2.0
    assert answer.overall_rate == 2.0
    assert answer_of([(11.0, [5, 6])], began=10.0).decode_rate == 0.0, "nothing came after"
    with pytest.raises(PeerError, match="at least one must come"):
        answer_of([(11.0, [])], began=10.0)


def test_lines_of_the_peers_stream_are_parsed() -> None:
    assert event_tokens(b'data: {"content": "x", "tokens": [5, 6]}\n') == [5, 6]
    assert event_tokens(b'data: {"content": "", "stop": true}\n') == []
    assert event_tokens(b"\n") == []


def test_the_peers_threads_wait_as_by_default() -> None:
    """What makes bough's share two processors makes a peer that has them for itself slower."""
    assert os.environ["GOMP_SPINCOUNT"], "bough.model sets it for whatever is started from here"
    ours = {"GOMP_SPINCOUNT": "3000", "PATH": "/bin"}
    assert peer_environment(ours, {}) == {"PATH": "/bin"}
    assert peer_environment(ours, {"GOMP_SPINCOUNT": "7"}) == {"GOMP_SPINCOUNT": "7", "PATH": "/bin"}


class _Completion(BaseHTTPRequestHandler):
    """Answers as llama.cpp does."""

    asked: dict[str, Any]

    def do_POST(self) -> None:
        type(self).asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200 if self.path == "/completion" else 404)
        self.end_headers()
        for event in ({"tokens": [5]}, {"tokens": [6]}, {"tokens": [], "stop": True}):
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its name there
        """Says nothing."""


@pytest.fixture
def address() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), _Completion)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_peer_decodes_greedily_without_its_cache(address: str) -> None:
    answer = LlamaServer({"address": address, "version": "1", "system_info": "none"}).ask([3, 4], 2)
    assert answer.token_ids == (5, 6)
    wanted = {"prompt": [3, 4], "n_predict": 2, "temperature": 0, "ignore_eos": True, "cache_prompt": False}
    assert wanted.items() <= _Completion.asked.items()


def test_a_missing_peer_is_named(address: str) -> None:
    with pytest.raises(PeerError, match=r"llama\.cpp does not answer"):
        LlamaServer({"address": f"{address}/elsewhere", "version": "1", "system_info": "none"}).ask([3], 2)


class FakeSides:
    """Rates by side instead of processes; which prompts were asked, in which order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[tuple[str, int]] = []  # side and prompt
        monkeypatch.setattr(peer_llama_cpp, "drop_cached", lambda _: None)
        monkeypatch.setattr(peer_llama_cpp, "llama_server", self._llama_server)
        monkeypatch.setattr(peer_llama_cpp, "bough_up", self._bough_up)

    def answer(self, side: str, prompt: Sequence[int], rate: float) -> Answer:
        self.asked.append((side, prompt[0]))
        return Answer((5, 6, 7, 8 if side == "llama_cpp_draft" and prompt[0] == 2 else 9), 1.0, 1, 1.0 + 3 / rate)

    @contextmanager
    def _llama_server(
        self, python: str, settings: LlamaSettings, memory_bytes: int, variables: dict[str, str]
    ) -> Iterator[Any]:
        assert (python, memory_bytes, variables) == ("python-of-peer", 1000, {"A": "b=c"})
        rates = {"bf16.gguf": 1.0, "q4.gguf": 9.0}
        side = {"bf16.gguf": "llama_cpp_plain", "q4.gguf": "llama_cpp_plain_4_bit"}[settings.model]
        rate, sides = rates[settings.model], self
        if settings.draft:
            side, rate = "llama_cpp_draft", {4: 1.5, 8: 2.0, 16: 1.2}[settings.draft_tokens]

        class Server:
            version, system_info = "1.2", "AVX2 = 1"

            def ask(self, prompt: Sequence[int], num_tokens: int) -> Answer:
                return sides.answer(side, prompt, rate)

        yield Server()

    @asynccontextmanager
    async def _bough_up(self, context: int, memory_bytes: int, *, is_resident: bool) -> AsyncIterator[Any]:
        assert (context, memory_bytes, is_resident) == (512, 1000, False)
        sides = self

        class Bough:
            async def ask(self, prompt: Sequence[int], num_tokens: int, *, is_plain: bool) -> Answer:
                return sides.answer("bough_plain" if is_plain else "bough", prompt, 1.1 if is_plain else 4.0)

        yield Bough()


async def test_lengths_are_chosen_on_some_prompts_and_sides_scored_on_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The length is chosen on some prompts, all sides are scored on the others, and a text that differs is reported."""
    sides = FakeSides(monkeypatch)
    arguments = parse_arguments(["--prompts", "4", "--peer-python", "python-of-peer", "--peer-variable", "A=b=c"])
    prompts = Prompts([[0], [1], [2], [3]], [7], EOS)
    pair, small = Pair(Path("bf16.gguf"), Path("draft.gguf")), Pair(Path("q4.gguf"), Path("draft-q4.gguf"))
    bench = Bench(arguments, prompts, pair, small)
    figures = json.loads(json.dumps(await bench.measure(Regime("limited", 1000, minutes=5))))
    assert sides.asked[0] == ("bough", 7), "to warm up"
    assert sides.asked[1:7] == [("llama_cpp_draft", number) for number in (1, 1, 1, 3, 3, 3)]
    assert sorted(sides.asked[7:]) == sorted((side, number) for number in (0, 2) for side in SIDES)
    assert figures["draft_tokens"] == 8
    assert figures["chosen_by"] == {"4": [1.5, 1.5], "8": [2.0, 2.0], "16": [1.2, 1.2]}
    assert figures["tokens_per_second"]["bough"] == {"geomean": 4.0, "worst": 4.0, "best": 4.0}
    assert {name: each["geomean"] for name, each in figures["ratio"].items()} == {
        "with_draft": 2.0,
        "plain": 1.1,
        "over_4_bit": 0.444,
    }
    assert (figures["prompts_chosen_on"], figures["prompts_scored_on"]) == (2, 2)
    assert figures["equal_texts"] is False
    assert figures["differences"] == {"llama_cpp_draft": {"2": 3}}
    assert bench.llama_cpp == {"xllamacpp": "1.2", "system_info": "AVX2 = 1"}


async def test_after_the_time_limit_one_prompt_of_each_half_remains(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeSides(monkeypatch)
    arguments = parse_arguments(["--prompts", "6", "--peer-python", "python-of-peer", "--peer-variable", "A=b=c"])
    prompts = Prompts([[number] for number in range(6)], [7], EOS)
    pair, small = Pair(Path("bf16.gguf"), Path("draft.gguf")), Pair(Path("q4.gguf"), Path("draft-q4.gguf"))
    figures = await Bench(arguments, prompts, pair, small).measure(Regime("limited", 1000, minutes=-1))
    assert (figures["prompts_chosen_on"], figures["prompts_scored_on"]) == (1, 1)
    assert figures["equal_texts"] is True


def test_a_summary_has_every_side_and_ratio() -> None:
    rates = {side: [1.0, 2.0] for side in SIDES}
    figures = json.loads(json.dumps(summary(rates, rates, 4, seed=1)))
    assert set(figures["tokens_per_second"]) == set(SIDES)
    assert set(figures["ratio"]) == set(figures["overall_ratio"]) == {"with_draft", "plain", "over_4_bit"}
    assert set(SAME_WEIGHTS) < set(SIDES)


def test_the_reason_for_missing_control_groups_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "CGROUPS", tmp_path / "none")
    assert why_unlimited(1000).startswith("control groups for memory cannot be made here: ")
    (tmp_path / "memory").mkdir()
    monkeypatch.setattr(limits, "CGROUPS", tmp_path)
    assert why_unlimited(1000) == ""
    (group,) = (tmp_path / "memory").glob("bough-*")
    assert (group / "memory.limit_in_bytes").read_text() == "1000"


def test_a_python_without_the_peer_is_refused(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    for name in (str(python), str(tmp_path / "none")):
        with pytest.raises(PeerError, match=r"--peer-python: must be a Python that can import xllamacpp"):
            require_peer(name)
    python.write_text("#!/bin/sh\nexit 0\n")
    require_peer(str(python))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--prompts", "1"], "--prompts: must be 2 to 23, got 1"),
        (["--prompts", "24"], "--prompts: must be 2 to 23, got 24"),
        (["--peer-variable", "A"], "--peer-variable: must be NAME=VALUE, got A"),
        (["--tokens", "3"], "--tokens: must be at least 16, got 3"),
    ],
)
def test_invalid_arguments_are_refused(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(flags)
    assert message in capsys.readouterr().err
