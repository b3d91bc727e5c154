"""`bough explain`: reasons and sums from decisions, and the command with simulated workers."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

import bough.cli.inspection.explain as explain_module
import orchestrator.serving.requests as requests_module
from bough.cli.inspection.doctor import doctor
from bough.cli.inspection.explain import as_json, explain, save_decisions, summary, table
from bough.cli.main import argument_parser
from bough.client import Client
from bough.errors import ConfigError, NotFound, Unavailable
from bough.processes.exit_with_parent import MODULE
from bough.protocol.decision import Decision, Mode, RoundSeconds
from bough.protocol.generation import GenerateOptions, Speculation, Started, TextPrompt
from bough.protocol.ids import ScopedId
from bough.sizing.account import account, why
from bough.trees.tree_plan import Scheme, StaticShape
from tests.fakes.fleet import Fleet
from tests.fakes.simulated import pair_of
from tests.fakes.stack import simulated_stack

DRAFTED = Decision(
    1, Mode.DRAFT, "d", budget=64, width=8, depth=24, price=4.0, draft_rate=4.1, plain_rate=1.1, num_context=35,
    num_grown=60, num_sent=50, num_left_out=10, num_steps=7, num_rows=90, expected_tokens=4.4, tokens=5,
    expected=RoundSeconds(draft=0.1, sweep=1.0), seconds=RoundSeconds(draft=0.2, sweep=1.05),
)  # fmt: skip
PLAIN = Decision(
    2, Mode.LOOKUP, price=1.0, draft_rate=0.5, plain_rate=1.0, expected_tokens=1.0, tokens=1,
    expected=RoundSeconds(sweep=1.0), seconds=RoundSeconds(sweep=1.0),
)  # fmt: skip
FIXED = Decision(3, Mode.FIXED, budget=4, num_grown=4, num_sent=4, tokens=2, seconds=RoundSeconds(sweep=0.5))


def test_rounds_are_summed_up() -> None:
    summed = account([DRAFTED, PLAIN, FIXED])
    assert summed.num_rounds == 3
    assert summed.shares == {Mode.DRAFT: 1 / 3, Mode.LOOKUP: 1 / 3, Mode.FIXED: 1 / 3}
    assert summed.mean_nodes == (40 + 1 + 4) / 3
    assert (summed.tokens, summed.num_predicted) == (8, 2)
    assert summed.seconds == pytest.approx(2.75)
    assert summed.token_bias == pytest.approx(5.4 / 6 - 1)
    assert summed.seconds_bias == pytest.approx(2.1 / 2.25 - 1)
    assert summed.real.draft == pytest.approx(0.1)
    assert summed.rate == pytest.approx(6 / 2.25)
    assert summed.plain_rate == pytest.approx(6 / (5 / 1.1 + 1))


def test_plain_decoding_is_rated_by_what_is_known_after_a_round() -> None:
    """The first rounds' costs were taken for slower than they turned out, and first answers for faster than plain."""
    before, learnt = replace(PLAIN, plain_rate=0.25), replace(PLAIN, plain_rate=1.0)
    assert account([before, learnt, learnt]).plain_rate == pytest.approx(1.0)
    reading = replace(PLAIN, plain_rate=0.25, num_context=100)  # slower than the others, as it reads a prompt
    assert account([learnt, reading, learnt]).plain_rate == pytest.approx(3 / (1 + 4 + 1))


def test_rounds_of_fixed_sizes_have_no_predictions() -> None:
    summed = account([FIXED])
    assert (summed.token_bias, summed.seconds_bias, summed.plain_rate) == (None, None, None)
    assert summed.rate == 4.0
    assert "these rounds have no predictions" in "\n".join(summary([FIXED]))


@pytest.mark.parametrize(
    ("mode", "draft_rate", "plain_rate", "reason"),
    [
        (Mode.DRAFT, 4.1, 1.1, "drafting pays: 4.1 against 1.1 tokens/s plain"),
        (Mode.DRAFT, 1.0, 1.01, "drafting continues: 1 against 1.01 tokens/s plain is not reason enough to stop"),
        (Mode.DRAFT, 0.0, 0.0, "a first size: the time of sweeps is not known yet"),
        (Mode.LOOKUP, 0.5, 1.0, "drafting does not pay: 0.5 against 1 tokens/s plain"),
        (Mode.LOOKUP, 1.2, 1.0, "no draft: 1.2 against 1 tokens/s plain is not reason enough to begin"),
        (Mode.LOOKUP, 1.0, 1.0, "no draft: 1 tokens/s plain"),
        (Mode.PROBE, 0.5, 1.0, "a small tree, to see whether drafting pays again: 0.5 against 1 tokens/s plain"),
        (Mode.FIXED, 0.0, 0.0, "the size was fixed, by the request or by --planner fixed"),
        (Mode.OFF, 0.0, 0.0, "no tree: the request disables trees, or one token is left"),
    ],
)
def test_reasons_for_a_size_are_explained_in_words(
    mode: Mode, draft_rate: float, plain_rate: float, reason: str
) -> None:
    decision = Decision(1, mode, draft_rate=draft_rate, plain_rate=plain_rate)
    assert why(decision) == reason


def test_a_prompt_read_in_the_same_sweep_is_mentioned() -> None:
    assert why(DRAFTED) == "drafting pays: 4.1 against 1.1 tokens/s plain; read 35 tokens of context"


def test_the_table_has_a_row_per_round_and_no_column_of_zeros() -> None:
    heading, *lines = table([DRAFTED, PLAIN, FIXED])
    assert heading.split() == [
        *("round", "mode", "budget", "width", "depth", "grown", "sent", "left", "out", "rows", "steps", "tokens"),
        *("seconds", "draft", "sweep", "lambda", "why"),
    ]
    assert lines[0].split()[:15] == [
        *("1", "draft", "64", "8", "24", "60", "50", "10", "90", "7", "4.4/5"),
        *("1.100/1.250", "0.100/0.200", "1.000/1.050", "4"),
    ]
    assert lines[2].split()[9:15] == ["0", "-/2", "-/0.500", "-/0.000", "-/0.500", "-"]
    ends = {line.index(why(each)) for line, each in zip(lines, (DRAFTED, PLAIN, FIXED), strict=True)}
    assert ends == {heading.index("why")}


def test_the_summary_has_comparisons_and_the_last_reasons() -> None:
    text = "\n".join(summary([DRAFTED, PLAIN]))
    assert "6 tokens in 2 rounds and 2.25 s; 20.5 nodes a round; rounds: 50% draft, 50% lookup" in text
    assert "over 2 rounds: tokens -10.0%, seconds -6.7%" in text
    assert "2.67 tokens per second; plain decoding was predicted to reach 1.08, of which that is 2.46 times" in text
    assert "last draft: round 1, drafting pays" in text
    assert "last lookup: round 2, drafting does not pay" in text


def test_experts_are_shown_where_they_were_counted() -> None:
    """Of rounds with trees; before, nobody could see why small trees pay or do not."""
    few = replace(DRAFTED, num_rows=4, plain_sweep=0.5, expected_expert_ratio=2.75, expert_ratio=2.5)
    many = replace(DRAFTED, num_rows=8, plain_sweep=0.5, expected_expert_ratio=3.75, expert_ratio=4.0)
    plain = replace(PLAIN, num_rows=1, plain_sweep=0.5, expected_expert_ratio=1.0, expert_ratio=1.0)
    heading, *lines = table([few, plain, FIXED])
    assert heading.split()[-3:] == ["experts", "lambda", "why"]
    cells = [line.removesuffix(why(each)).split() for line, each in zip(lines, (few, plain, FIXED), strict=True)]
    assert [each[-2] for each in cells] == ["2.75/2.50", "1.00/1.00", "-"]
    (line,) = [line for line in summary([few, plain, many, FIXED]) if "experts" in line]
    assert line == (
        "experts of sweeps with trees, in multiples of one row's: 3.25 expected and 3.25 chosen by 6 rows; these take "
        "2.00 times as long as a sweep without a tree"
    )
    assert as_json("s", [few])["summary"]["experts"]["chosen"] == 2.5
    for unknown in ([DRAFTED, PLAIN], [replace(few, plain_sweep=0.0)], [plain]):
        assert account(unknown).experts is None
        assert not any("experts" in line for line in summary(unknown))


def test_json_has_rounds_reasons_and_the_summary() -> None:
    value = json.loads(json.dumps(as_json("s", [DRAFTED, FIXED])))
    assert value["session"] == "s"
    assert [each["mode"] for each in value["rounds"]] == ["draft", "fixed"]
    assert value["rounds"][0]["expected"]["draft"] == 0.1
    assert value["rounds"][0]["why"] == why(DRAFTED)
    assert value["summary"]["shares"] == {"draft": 0.5, "fixed": 0.5}


def test_a_picture_that_cannot_be_written_names_its_flag(tmp_path: Path) -> None:
    save_decisions([DRAFTED, PLAIN, FIXED], "three rounds", str(tmp_path / "good.png"))
    assert (tmp_path / "good.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match="--plot"):
        save_decisions([FIXED], "one round", str(tmp_path / "missing" / "bad.png"))


@pytest.fixture(scope="module")
async def address(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    """Of an orchestrator with simulated workers."""
    folder = tmp_path_factory.mktemp("stack")
    async with simulated_stack(folder, pair_of(folder)) as stack:
        yield stack.addresses["orchestrator"]


async def started(client: Client, session_id: str = "", max_tokens: int = 30) -> Started:
    """A request that has been answered whole."""
    options = GenerateOptions(session_id=session_id, max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    events = [event async for event in client.generate(TextPrompt("Once upon a time"), options)]
    assert isinstance(events[0], Started)
    return events[0]


async def explained(address: str, capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    arguments = argument_parser().parse_args(["explain", "--address", address, *flags])
    assert await explain(arguments) == 0
    return capsys.readouterr().out


async def test_sessions_are_found_by_their_names_and_by_their_requests(
    address: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    async with Client(address) as client:
        await started(client, "named", max_tokens=25)
        nameless = await started(client, max_tokens=35)
    picture = tmp_path / "rounds.png"
    by_name = json.loads(await explained(address, capsys, "named", "--json", "--plot", str(picture)))
    by_request = json.loads(await explained(address, capsys, nameless.request_id, "--json"))
    last = json.loads(await explained(address, capsys, "--json"))
    assert by_name["summary"]["tokens"] >= 25
    assert by_request["summary"]["tokens"] >= 35
    assert by_request["rounds"] == last["rounds"] != by_name["rounds"]
    assert picture.read_bytes().startswith(b"\x89PNG")
    text = await explained(address, capsys, "named")
    assert text.startswith("session named\n")
    assert len(text.splitlines()) > 3 + len(by_name["rounds"])


async def test_an_unknown_session_gives_one_line_and_status_2(address: str) -> None:
    command = [sys.executable, *MODULE, "bough.cli.main", "explain", "nobody", "--address", address]
    outcome = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=False)
    assert outcome.returncode == 2
    assert outcome.stdout == ""
    problem = "session_id: must be a session or request with recent rounds here, got 'nobody'"
    assert outcome.stderr == f"error: {problem}\n"


async def test_sampled_trees_are_recorded_with_their_whole_size(address: str) -> None:
    """It was recorded as a root alone: metrics would have had no draft tokens of it."""
    shape = Speculation(growth=StaticShape((0, 0, 1, 1)), scheme=Scheme.WITHOUT_REPLACEMENT, lookup=0)
    options = GenerateOptions(session_id="sampled", max_tokens=20, temperature=0.8, seed=1, speculation=shape)
    async with Client(address) as client:
        async for _ in client.generate(TextPrompt("Once upon a time"), options):
            pass
        decisions = await client.decisions("sampled")
    assert {decision.mode for decision in decisions[:-1]} == {Mode.FIXED}
    assert {decision.num_sent for decision in decisions[:3]} == {5}


async def test_the_orchestrator_that_has_the_decisions_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several, each knows its own rounds only, and one may be down."""

    class OneOf:
        def __init__(self, address: str) -> None:
            self.address = address

        async def __aenter__(self) -> OneOf:
            return self

        async def __aexit__(self, *_: object) -> None:
            pass

        async def decisions(self, session: str) -> tuple[Decision, ...]:
            if self.address == "down:0":
                raise Unavailable("down:0 does not answer")
            if session != f"of {self.address}":
                raise NotFound("", f"{self.address} has no {session}")
            return (FIXED,)

    monkeypatch.setattr(explain_module, "client_from", lambda _, address: OneOf(address))
    arguments = argument_parser().parse_args(["explain", "of b:2", "--address", "down:0,a:1,b:2", "--json"])
    assert await explain(arguments) == 0
    arguments.session = "of c:3"
    with pytest.raises(NotFound, match="b:2 has no of c:3"):
        await explain(arguments)
    arguments.address = "down:0"
    with pytest.raises(Unavailable, match="down:0 does not answer"):
        await explain(arguments)


async def test_requests_are_found_by_name_for_a_while(fakes: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests_module, "MAX_NAMES", 2)
    await fakes.target("t")
    requests, _ = await fakes.orchestrator()
    for name in ("first", "second", "third"):
        options = GenerateOptions(request_id=name, max_tokens=3, temperature=0.0)
        assert [event async for event in requests.generate(TextPrompt("Once"), options)]
    assert len(requests.decisions(ScopedId("third"))) > 0
    assert len(requests.decisions(ScopedId("second"))) > 0
    with pytest.raises(NotFound, match=r"must be a session or request .*, got 'first'"):
        requests.decisions(ScopedId("first"))


async def test_the_running_orchestrator_serves_decisions(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    async with Client(address) as client:
        await started(client)
        url = (await client.server_info()).metrics_url
    assert await doctor(argument_parser().parse_args(["doctor", "--address", address])) == 0
    assert f"metrics at {url}\n" in capsys.readouterr().out
    text = (await asyncio.to_thread(httpx.get, url)).text
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    label, of_vllm = '{model_name="quick"}', '{engine="0",model_name="quick"}'
    assert float(values[f"vllm:generation_tokens_total{of_vllm}"]) >= 30
    assert float(values[f"vllm:spec_decode_num_accepted_tokens_total{of_vllm}"]) > 0
    assert float(values[f"bough_sizer_seconds_total{label}"]) > 0
    assert float(values[f"bough_sizer_plan_seconds_count{label}"]) > 0
