"""Every value survives the wire, and the generated code is what the .proto files say."""

from __future__ import annotations

import itertools
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bough.errors import InvalidRequest
from bough.pb import common_pb2, draft_pb2, generation_pb2
from bough.protocol import codec
from bough.protocol import codec_generation as wg
from bough.protocol import generation as g
from bough.protocol import messages as m
from bough.protocol.codec_fields import growth_to_wire, read, to_fields
from bough.protocol.cost_curve import CostCurve
from bough.protocol.decision import Decision, DraftCalibration, Mode, RoundSeconds, RoundTimings
from bough.protocol.generation import WorkerInfo
from bough.protocol.ids import ScopedId
from bough.protocol.sampling_params import BANNED, PositionLogprobs, SamplingParams, TokenLogprob
from bough.tokenization.vocabulary import TokenizerFiles
from bough.trees.scheme_acceptance import DepthCounts, SchemeAcceptance
from bough.trees.tree import DraftProbs, Tree
from bough.trees.tree_plan import BestFirst, Scheme, StaticShape, TreePlan

ROOT = Path(__file__).parents[2]
VOCAB = 100
POSITIVE = st.floats(0.1, 4.0)
BIASES = st.floats(-9, 9) | st.just(BANNED)

sampling_params = st.builds(
    SamplingParams,
    temperature=st.just(0.0) | st.floats(0.01, 4),
    top_k=st.integers(0, 50),
    top_p=st.floats(0.01, 1),
    min_p=st.floats(0, 1),
    top_n_sigma=st.floats(-1, 100),
    seed=st.integers(0, 2**64 - 1),
    repetition_penalty=POSITIVE,
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), BIASES, max_size=3),
    logprobs=st.none() | st.integers(0, 20),
    stop_token_ids=st.frozensets(st.integers(0, VOCAB - 1), max_size=3),
    min_tokens=st.integers(0, 2**31),
)
id_parts = st.text(st.sampled_from(":%a/é") | st.characters(codec="utf-8"), max_size=8)
ids = st.builds(ScopedId, id_parts, id_parts)
contexts = st.builds(
    m.Context,
    session_id=ids.filter(bool),
    context_start=st.integers(0, 1000),
    prefix_hash=st.integers(0, 2**64 - 1),
    tokens=st.lists(st.integers(0, VOCAB - 1)).map(tuple),
    prompt_length=st.integers(0, 1000),
)
counts = st.integers(0, 2**32 - 1)
timings = st.builds(
    m.Timings, *[st.integers(0, 2**40)] * 6, num_passes=st.integers(0, 99), num_experts=counts, row_experts=counts
)
logprobs = st.builds(
    PositionLogprobs,
    st.builds(TokenLogprob, st.integers(0, VOCAB), st.floats(-9, 0, width=32)),
    st.lists(st.builds(TokenLogprob, st.integers(0, VOCAB), st.floats(-9, 0, width=32)), max_size=3).map(tuple),
)
TREE = Tree.of([3, 4, 5], [-1, 0, 1], [0, -0.5, -0.25])


growths = st.sampled_from(
    [
        BestFirst(8, 4, 2),
        BestFirst(8, 4, 2, 0.01, 1.5),
        StaticShape((0, 0, 1, 1, 2)),
        StaticShape(()),
        StaticShape.chains(2, 3),
    ]
)
plans = st.builds(TreePlan, growths, st.sampled_from(Scheme))
SAMPLED = replace(
    TREE,
    draft_probs=DraftProbs.joined(
        {
            0: (np.array([4, 9], np.int32), np.array([0.25, 0.5], np.float32)),
            1: (np.array([5], np.int32), np.array([1.0], np.float32)),
        }
    ),
    draws=np.array([1], np.int32),
)

COST = CostCurve((1, 64), (0.5, 0.75), 8)


@given(ids, ids)
def test_an_id_round_trips_through_text_and_ids_are_distinct(one: ScopedId, other: ScopedId) -> None:
    """Names, and here even tenants, may contain what separates them in the text."""
    assert ScopedId.parse(str(one)) == one
    assert (str(one) == str(other)) == (one == other)


@pytest.mark.parametrize(
    ("one", "text"),
    [
        (ScopedId("chat", "acme"), "acme::chat"),
        (ScopedId("chat"), "chat"),
        (ScopedId("acme::chat"), "::acme::chat"),
        (ScopedId("::chat", "acme"), "acme::::chat"),
    ],
)
def test_logs_and_the_index_show_the_tenant_before_the_name(one: ScopedId, text: str) -> None:
    assert str(one) == text


@given(contexts, sampling_params, st.sampled_from([TREE, SAMPLED]), plans)
def test_calls_round_trip_over_the_wire(context: m.Context, params: SamplingParams, tree: Tree, plan: TreePlan) -> None:
    if plan.scheme.is_sampled:  # the others are only for trees that were sampled, perhaps with additions
        tree = SAMPLED
    verify = m.VerifyCall(context, 2**60, 7, tree, params, plan.scheme, 400, "me", 3, "you", True, True)
    assert codec.verify_call_from_wire(codec.verify_call_to_wire(verify), VOCAB, 8) == verify
    grow = m.GrowCall(context, 5, params, 3, plan, VOCAB + 7)
    assert codec.grow_call_from_wire(codec.grow_call_to_wire(grow), VOCAB, 8) == grow


@given(timings, st.lists(logprobs, max_size=3).map(tuple))
def test_results_round_trip_over_the_wire(times: m.Timings, positions: tuple[PositionLogprobs, ...]) -> None:
    result = m.VerifyResult(m.Verdict((1, 2), 9, positions), 11, times, 5, (3, 5), COST, 40, 2, 2.5)
    assert codec.verify_result_from_wire(codec.verify_result_to_wire(result)) == result
    grown = m.GrowResult(TREE, 3, times, 17, COST)
    assert codec.grow_result_from_wire(codec.grow_result_to_wire(grown)) == grown


options = st.builds(
    g.GenerateOptions,
    request_id=st.text(max_size=5),
    session_id=st.text(max_size=5),
    temperature=st.floats(0, 4),
    top_k=st.integers(0, 9),
    seed=st.none() | st.integers(0, 2**64 - 1),
    logit_bias=st.dictionaries(st.integers(0, 9), BIASES, max_size=2),
    max_tokens=st.integers(1, 999),
    stop=st.lists(st.text(max_size=3), max_size=2).map(tuple),
    ignore_eos=st.booleans(),
    logprobs=st.none() | st.integers(0, 9),
    stop_token_ids=st.frozensets(st.integers(0, 9), max_size=3),
    min_tokens=st.integers(0, 9),
    speculation=st.builds(
        g.Speculation,
        st.booleans(),
        *[st.none() | st.integers(0, 9)] * 3,
        st.none() | growths,
        st.sampled_from(Scheme),
        st.none() | st.integers(0, 9),
    ),
    continues=st.booleans(),
    constraint=st.none() | st.builds(g.Constraint, regex=st.text(max_size=3), after_reasoning=st.booleans()),
    resume=st.none() | st.builds(g.Resume, st.integers(0, 9), st.lists(st.integers(0, 9), max_size=3).map(tuple)),
)
messages = st.builds(g.Message, st.text(), st.text(), reasoning=st.text())
prompts = st.one_of(
    st.builds(g.TextPrompt, st.text()),
    st.builds(g.ChatPrompt, st.lists(messages, max_size=2).map(tuple), chat_template_kwargs=st.text(max_size=5)),
    st.builds(g.TokenPrompt, st.lists(st.integers(0, 9), max_size=4).map(tuple)),
)


@given(prompts, options)
def test_requests_round_trip_over_the_wire(prompt: g.Prompt, request_options: g.GenerateOptions) -> None:
    message = generation_pb2.GenerateRequest.FromString(wg.request_to_wire(prompt, request_options).SerializeToString())
    assert wg.request_from_wire(message) == (prompt, request_options)
    message.sampling.grammar = "start: x"
    with pytest.raises(InvalidRequest, match=r"sampling\.grammar: must be left out"):
        wg.request_from_wire(message)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": -1}, "max_tokens: must be 1 to 4294967295, got -1"),
        ({"logprobs": -1}, "logprobs: must be 0 to 64, got -1"),
        ({"max_tokens": 10**20}, "max_tokens: must be 1 to 4294967295.* got 100000000000000000000"),
        ({"seed": -1}, "seed: must be 0 to 18446744073709551615.* got -1"),
        ({"seed": 2**64}, "seed: must be 0 to.* got 18446744073709551616"),
        ({"top_k": -1}, "top_k: must .* got -1"),
        ({"logprobs": -1}, "logprobs: must .* got -1"),
        ({"stop_token_ids": frozenset({5, -1})}, r"stop_token_ids: must .* got -1"),
        ({"logit_bias": {-3: 1.0}}, r"logit_bias\[-3\]: must .* got -3"),
        ({"speculation": g.Speculation(budget=-1)}, r"speculation\.budget: must .* got -1"),
        ({"speculation": g.Speculation(lookup=10**11)}, r"speculation\.lookup: must .* got 100000000000"),
        (
            {"speculation": g.Speculation(growth=StaticShape((0, -1)))},
            r"speculation\.growth\.parents\[1\]: must .* got -1",
        ),
    ],
)
def test_numbers_that_no_message_can_carry_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    """The orchestrator decides which values are valid; protobuf's errors name neither field nor allowed values."""
    with pytest.raises(InvalidRequest, match=message):
        wg.request_to_wire(g.TextPrompt("hi"), g.GenerateOptions(**options))
    with pytest.raises(InvalidRequest, match=r"token_ids\[2\]: must .* got -7"):
        wg.request_to_wire(g.TokenPrompt((1, 2, -7)), g.GenerateOptions())


@pytest.mark.parametrize(
    ("prompt", "options", "name"),
    [
        (g.TextPrompt("caf\udce9"), {}, "text: "),
        (g.ChatPrompt((g.Message("user", "a"), g.Message("user", "caf\udce9"))), {}, r"chat\.messages\[1\]\.content: "),
        (g.ChatPrompt((g.Message("user", "a", reasoning="caf\udce9"),)), {}, r"chat\.messages\[0\]\.reasoning: "),
        (g.ChatPrompt((), chat_template_kwargs="caf\udce9"), {}, r"chat\.chat_template_kwargs: "),
        (g.TextPrompt("a"), {"stop": ("b", "caf\udce9")}, r"stop\[1\]: "),
        (g.TextPrompt("a"), {"session_id": "caf\udce9"}, "session_id: "),
    ],
)
def test_bytes_that_are_not_text_are_refused_by_name(prompt: g.Prompt, options: dict[str, Any], name: str) -> None:
    """What Python makes of a command line, or of a file, in Latin-1."""
    with pytest.raises(InvalidRequest, match=rf"^{name}must be UTF-8, got '\\udce9' at character 3"):
        wg.request_to_wire(prompt, g.GenerateOptions(**options))


@given(st.lists(logprobs, max_size=2).map(tuple))
def test_events_round_trip_over_the_wire(positions: tuple[PositionLogprobs, ...]) -> None:
    times, metrics = RoundTimings(*range(9)), g.SpeculationMetrics(1, 2, 3, 1.5, (0, 1), 4, 2)
    for event in (
        g.Started("r", 3, 2**63, "model", 7),
        g.Tokens((1, 2), (True, False), ("a", ""), positions, 8, 3, times, 1),
        g.Finished("stop", "x", "tail", g.Usage(1, 2, 3), metrics, times, ("w",), 2, 0),
    ):
        assert wg.event_from_wire(wg.event_to_wire(event)) == event


@given(st.lists(st.tuples(*[st.lists(st.floats(0, 1e6)).map(tuple)] * 2), max_size=3), st.sampled_from(Scheme))
def test_acceptance_round_trips_over_the_wire(
    depths: list[tuple[tuple[float, ...], tuple[float, ...]]], scheme: Scheme
) -> None:
    counted = (
        SchemeAcceptance(scheme, 2**40, tuple(DepthCounts(*depth) for depth in depths)),
        SchemeAcceptance(Scheme.TARGET, 1, ()),
    )
    drafts = (DraftCalibration("draft-1", 2**40, 5.25, 4.75, 0.5, 0.75), DraftCalibration("", 0, 1.0, 1.0, 0, 0))
    sent = generation_pb2.Acceptance(schemes=map(to_fields, counted), drafts=map(to_fields, drafts))
    message = generation_pb2.Acceptance.FromString(sent.SerializeToString())
    assert tuple(read(one, SchemeAcceptance) for one in message.schemes) == counted
    assert tuple(read(one, DraftCalibration) for one in message.drafts) == drafts
    message.schemes[0].scheme = 7  # from another release
    with pytest.raises(InvalidRequest, match=r"schemes\.scheme: must be .* got 7"):
        read(message.schemes[0], SchemeAcceptance, "schemes.")


def test_decisions_round_trip_over_the_wire() -> None:
    decision = Decision(3, Mode.PROBE, "draft-1", 4, 2, 2, 1.5, 0.25, 2.0, 1.75, 12, 30, 5, 4, 1, 2, 34, 1.5, 2)
    decision.expected, decision.seconds = RoundSeconds(1, 2, 3, 4, 5), RoundSeconds(0.5, 0.25, 0, 8, 16)
    decision.plain_sweep, decision.expected_expert_ratio, decision.expert_ratio = 0.5, 2.5, 2.25
    message = generation_pb2.Decision(**to_fields(decision))
    assert read(message, Decision) == decision
    message.mode = "guess"
    with pytest.raises(InvalidRequest, match=r"decisions\.mode: must be one of draft, lookup.* got 'guess'"):
        read(message, Decision, "decisions.")


def test_descriptions_round_trip_over_the_wire() -> None:
    info = WorkerInfo(
        "draft", "id", "name", "words", "f", "t", 9, 8, 7, 6, 5, 40, 30, 2, 4, ("a", "b"), 3, "0.1", "64 rows", COST,
        stages=(g.StageStatus("b:1", 5, 9, 2**40, 7, 8, 9),), stage_network_ns=6,
    )  # fmt: skip
    assert read(common_pb2.WorkerInfo(**to_fields(info)), WorkerInfo) == info
    server = g.ServerInfo(
        (g.WorkerStatus("a:1", info, "p"),), "index", "url", 1, "0.1", True, "http://a:2/metrics", "http://a:3", ("u",)
    )
    assert read(generation_pb2.ServerInfo(**to_fields(server)), g.ServerInfo) == server
    model = g.ModelInfo("n", "d", "f", "t", 9, 8, (1, 2))
    models = (model, replace(model, model_name="o", max_context=7))
    message = wg.models_to_wire(models)
    assert wg.models_from_wire(message) == models
    assert (message.model_name, message.max_context) == ("n", 8), "a client that knows one model reads the first"
    loads = g.Loads(1, 2, 3, 4)
    assert read(generation_pb2.Loads(**to_fields(loads)), g.Loads) == loads


@given(st.binary(max_size=3_000_000))
def test_a_tokenizer_is_sent_in_pieces_that_fit_a_message(data: bytes) -> None:
    files = TokenizerFiles(data, "template", (1, 2), "<s>", "</s>", "another")
    chunks = list(codec.tokenizer_to_wire(files))
    assert all(chunk.ByteSize() < 2_000_000 for chunk in chunks)
    assert codec.tokenizer_from_wire(chunks) == files


def test_sizes_and_names_out_of_range_are_refused_by_name() -> None:
    context = m.Context(ScopedId("s"), 0, 0, (1,), 1)
    good = codec.grow_call_to_wire(m.GrowCall(context, 5, SamplingParams(), 0, TreePlan(BestFirst(8, 4, 2))))
    for field, value, message in (
        ("growth", BestFirst(0, 4, 2), r"growth\.budget: must be 1 to 8.* got 0"),
        ("growth", BestFirst(8, 9, 2), r"growth\.width: must .* got 9"),
        ("growth", BestFirst(8, 4, 2, -0.5), r"growth\.min_gain: must be 0 \(off\) or more.* got -0.5"),
        ("growth", BestFirst(8, 4, 2, float("nan")), r"growth\.min_gain: must .* got nan"),
        ("growth", BestFirst(8, 4, 2, 0.0, float("inf")), r"growth\.seconds: must .* got inf"),
        ("growth", StaticShape.chains(4, 2), "growth: must have at most 8 nodes, got 9"),
        ("growth", StaticShape((0, 2)), r"growth\.parents\[1\]: must be 0 to 1, .* got 2"),
        ("growth", StaticShape((0, 1, 0)), r"growth\.parents\[2\]: must be 1 to 2, .* got 0"),
        ("scheme", 7, r"scheme: must be one of 0 \(target\).* got 7"),
        ("root_token", VOCAB, rf"root_token\[0\]: must .* got {VOCAB}"),
        ("root_token", -1, r"root_token\[0\]: must .* got -1"),
        ("vocab_size", 5, r"root_token\[0\]: must be 0 to 4, got 5"),
        ("vocab_size", 2**31, "vocab_size: must be at most 2147483647, got 2147483648"),
    ):
        broken = draft_pb2.GrowRequest()
        broken.CopyFrom(good)
        if isinstance(value, int):
            setattr(broken, field, value)
        else:
            broken.growth.CopyFrom(growth_to_wire(value))
        with pytest.raises(InvalidRequest, match=message):
            codec.grow_call_from_wire(broken, VOCAB, 8)
    for nameless in ("", "acme::"):
        good.context.session_id = nameless
        with pytest.raises(InvalidRequest, match=r"context\.session_id"):
            codec.grow_call_from_wire(good, VOCAB, 8)


def test_generated_code_is_up_to_date(tmp_path: Path) -> None:
    """`make proto` after a change of a .proto file was forgotten."""
    (tmp_path / "bough" / "pb").mkdir(parents=True)
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi")]
    files = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "proto").glob("*.proto"))
    command = [sys.executable, "-m", "grpc_tools.protoc", "-Ibough/pb=proto", *outputs, *files]
    subprocess.run(command, cwd=ROOT, check=True)
    fresh = {path.name: path.read_text() for path in (tmp_path / "bough" / "pb").iterdir()}
    committed = {p.name: p.read_text() for p in (ROOT / "bough" / "pb").glob("*_pb2*.py*")}
    assert fresh == committed


def test_every_field_of_the_protocol_has_a_comment() -> None:
    for file in (ROOT / "proto").glob("*.proto"):
        lines = [line.strip() for line in file.read_text().splitlines()]
        for before, line in itertools.pairwise(lines):
            if line.endswith(";") and "=" in line and not line.startswith(("syntax", "//")):
                assert before.startswith("//"), f"{file.name}: {line} has no comment above it"
