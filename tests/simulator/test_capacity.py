"""Capacity, against cases that can be worked out by hand; deterministic; bad flags refused by name."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from bough.cli.main import main
from bough.errors import ConfigError
from bough.simulation.profile import Profile, load_profile, parse_profile
from bough.simulation.text_model import FIRST_WORD, NUM_WORDS, TextModel
from simulator.capacity import purchases, simulate
from simulator.guesses import expected_tokens
from simulator.scenario import RequestKind, Scenario, of_size
from target_worker.kv.slot_index import SessionSlot
from target_worker.kv.slot_pool import SlotPool


def profile_of(network: float = 0.0, kind: str = "by_rank", step: float = 0.02, **target: float) -> Profile:
    """Without jitter, so that seconds can be worked out."""
    model = {"kind": kind} | ({"vector": [0.7, 0.1, 0.05]} if kind == "by_rank" else {})
    described = {
        "source": "made up",
        "target": {"max_context": 100_000, "kv_tokens": 1_000_000, **target},
        "draft": {"base_seconds": step},
        "network": {"one_way_seconds": network},
        "acceptance": model,
    }
    return parse_profile(json.dumps(described))


def test_plain_decoding_of_one_user_takes_a_sweep_and_a_call_for_each_token() -> None:
    profile = profile_of(network=0.025, link_seconds=1.0, overhead_seconds=0.1)
    report = simulate(Scenario(profile, num_drafts=0, kinds=(RequestKind(10, 40),)))
    assert report.tpot == pytest.approx((1.1 + 0.05,) * 3)
    assert report.ttft.p50 == pytest.approx(1.1 + 0.05)
    assert report.latency.p95 == pytest.approx(40 * 1.15)
    assert report.tokens_per_second == pytest.approx(1 / 1.15)
    assert report.link_busy == pytest.approx(1.0 / 1.15)
    assert report.tokens_per_round == 1.0
    assert report.parts["network"] == pytest.approx(0.05 / 1.15)
    assert report.bottleneck == "the targets' link"


def test_one_user_takes_drafting_network_and_sweep_for_the_tokens_of_a_round() -> None:
    profile = profile_of(network=0.05, link_seconds=1.0)
    size = of_size(16, 6)
    scenario = Scenario(profile, kinds=(RequestKind(16, 200),), fixed=size)
    report = simulate(scenario)
    tokens = expected_tokens(TextModel(profile.acceptance, FIRST_WORD, NUM_WORDS), size)
    assert report.round_seconds == pytest.approx(
        1.0 + 6 * 0.02 + 2 * 0.1, rel=4e-3
    )  # last rounds are no deeper than left
    # 6,000 tokens in about 2,000 rounds, whose tokens deviate by less than 2.2: standard error 0.05, three of them.
    assert abs(report.tokens_per_round - tokens) < 0.15  # the last rounds have fewer
    assert report.tpot.p50 == pytest.approx(report.round_seconds / tokens, rel=0.02)


def test_a_link_that_is_the_limit_serves_all_sessions_of_a_sweep() -> None:
    """Ten plain sessions fit in a sweep of one second: ten tokens a second, with any network."""
    profile = profile_of(link_seconds=1.0)
    report = simulate(Scenario(profile, num_users=10, num_drafts=0, kinds=(RequestKind(1, 50),)))
    assert report.tokens_per_second == pytest.approx(10.0, rel=0.01)
    assert report.riders_per_sweep == pytest.approx(10, rel=0.01)
    assert report.link_busy == pytest.approx(1.0, rel=0.01)


@pytest.mark.long
def test_if_computing_is_the_limit_more_users_gain_nothing() -> None:
    profile = profile_of(kind="hostile", compute_row_seconds=0.1)
    few, many = (simulate(Scenario(profile, num_users=users, kinds=(RequestKind(1, 60),))) for users in (4, 16))
    # A request of 60 tokens computes 60 rows and one of its prompt: 60 tokens in 6.1 seconds of computing.
    assert few.tokens_per_second == pytest.approx(60 / 6.1, rel=0.02)
    assert many.tokens_per_second == pytest.approx(60 / 6.1, rel=0.02)
    assert many.tpot.p50 > 3 * few.tpot.p50
    assert many.bottleneck == "the targets' computing"
    assert many.nodes == 1, "a hostile draft is not asked"


@pytest.mark.long
def test_ten_targets_serve_ten_times_as_much() -> None:
    profile = profile_of(link_seconds=1.0, compute_row_seconds=0.01)
    one = simulate(Scenario(profile, num_users=6, kinds=(RequestKind(50, 100),)))
    ten = simulate(Scenario(profile, num_users=60, num_targets=10, num_drafts=10, kinds=(RequestKind(50, 100),)))
    assert ten.tokens_per_second == pytest.approx(10 * one.tokens_per_second, rel=0.05)


def test_a_user_without_a_place_waits_as_long_as_littles_law_says() -> None:
    """4 places and 400 users who never think: users = tokens per second / tokens of a request x latency."""
    profile = profile_of(link_seconds=1.0, kv_tokens=248, max_context=1000)
    report = simulate(Scenario(profile, num_users=400, num_drafts=0, kinds=(RequestKind(10, 50),)))
    assert report.riders_per_sweep == pytest.approx(4, rel=0.03)
    assert report.tokens_per_second == pytest.approx(4.0, rel=0.03)
    assert report.latency.p50 == pytest.approx(400 / (report.tokens_per_second / 50), rel=0.03)
    assert report.waiting_users == pytest.approx(396, rel=0.03)
    assert report.bottleneck.endswith("KV memory for all users at once")
    whole = simulate(Scenario(profile, num_users=7, num_drafts=0, kinds=(RequestKind(10, 50),)))
    assert whole.waiting_users == pytest.approx(3, rel=0.1), "simulated, every one of them"


@pytest.mark.parametrize("kv_tokens", [1400, pytest.param(5000, marks=pytest.mark.long)])
def test_all_requests_end_with_any_amount_of_memory(kv_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """And slots never overlap: the target's own pool checks them after every answer."""
    end_call = SlotPool.end_call

    def checked(pool: SlotPool, session: SessionSlot) -> None:
        end_call(pool, session)
        pool.check_integrity()

    monkeypatch.setattr(SlotPool, "end_call", checked)
    profile = profile_of(link_seconds=1.0, kv_tokens=kv_tokens, max_context=1024, max_nodes=64)
    kinds = (RequestKind(100, 900), RequestKind(50, 300))
    report = simulate(Scenario(profile, num_users=4, kinds=kinds, requests_each=2))
    assert report.num_requests == 8
    assert report.is_complete
    assert (report.preemptions > 0) == (kv_tokens == 1400), "elsewhere few enough come in at once"


def test_users_that_pause_send_fewer_requests() -> None:
    profile = profile_of(link_seconds=0.1)
    report = simulate(Scenario(profile, num_users=5, num_drafts=0, kinds=(RequestKind(1, 10),), think_seconds=99.0))
    # 100 exponential pauses of mean 99 for each five users: standard error 10 %, and five of these.
    assert report.tokens_per_second == pytest.approx(5 * 10 / 100, rel=0.5)
    assert report.waiting_users == 0


def test_a_burst_is_measured_from_the_start() -> None:
    profile = profile_of(link_seconds=1.0)
    report = simulate(Scenario(profile, num_users=3, num_drafts=0, kinds=(RequestKind(5, 20),), requests_each=2))
    assert report.num_requests == 6
    assert report.measured_seconds == pytest.approx(40.0)
    assert report.tokens_per_second == pytest.approx(3 * 2 * 20 / 40)


@pytest.mark.long
def test_a_link_that_slows_down_in_mid_run_is_noticed() -> None:
    profile = profile_of(link_seconds=1.0)
    slowed = parse_profile(
        json.dumps(
            {
                "source": "made up",
                "target": {"link_seconds": 1.0},
                "draft": {},
                "acceptance": {"kind": "hostile"},
                "events": [{"at_second": 0, "link": 3}],
            }
        )
    )
    plain = simulate(Scenario(profile, num_drafts=0, kinds=(RequestKind(5, 20),)))
    slow = simulate(Scenario(slowed, kinds=(RequestKind(5, 20),)))
    assert slow.tpot.p50 == pytest.approx(3 * plain.tpot.p50)


def test_only_the_same_seed_gives_the_same_report() -> None:
    scenario = Scenario(load_profile("two-cores"), num_users=2, kinds=(RequestKind(20, 10),))
    assert simulate(scenario) == simulate(scenario)
    assert simulate(scenario) != simulate(replace(scenario, seed=2))


def test_a_hundred_thousand_users_are_simulated_as_shares() -> None:
    scenario = Scenario(load_profile("a100-70b-4bit"), num_users=100_000, num_targets=1000, num_drafts=1000)
    share, num_shares = scenario.sliced()
    assert (share.num_users, share.num_targets, share.num_drafts, num_shares) == (100, 1, 1, 1000)
    share, num_shares = replace(scenario, num_users=99_999, num_targets=1003).sliced()
    assert (share.num_users, share.num_targets, share.num_drafts, num_shares) == (100, 1, 1, 1002), (
        "as nearly as can be"
    )
    share, num_shares = replace(scenario, num_targets=1002, num_drafts=3).sliced()
    assert (share.num_targets, share.num_drafts, num_shares) == (334, 1, 3), "or as many more are not divided"
    assert replace(scenario, num_users=8, num_targets=7).sliced()[1] == 1


def test_the_gain_of_more_targets_is_not_a_rounding_error() -> None:
    """Shares of 22 users for 4 targets, and of 43 for 9, made a tenth more targets look 5 % better than they are."""
    scenario = Scenario(load_profile("a100-70b-4bit"), num_users=1000, num_targets=185, num_drafts=92)

    def error(scenario: Scenario) -> float:
        share, _ = scenario.sliced()
        return share.num_users / share.num_targets * scenario.num_targets / scenario.num_users - 1

    assert error(scenario) == pytest.approx(error(replace(scenario, num_targets=203)), abs=0.011)


def test_a_run_that_is_too_long_ends_and_is_reported_as_incomplete() -> None:
    profile = profile_of(link_seconds=1.0)
    scenario = Scenario(profile, num_users=20, num_drafts=0, kinds=(RequestKind(5, 50),), max_rounds=20 * 62)
    report = simulate(scenario)
    assert not report.is_complete
    assert report.num_requests >= 4
    assert report.tokens_per_second == pytest.approx(20.0, rel=0.1)
    assert report.tpot.p50 == pytest.approx(1.0)
    with pytest.raises(ConfigError, match=r"^--users: must be fewer, .* within the \d+ rounds .*; got 20 users of 1 t"):
        simulate(replace(scenario, max_rounds=20 * 20))
    (bought,) = (each for each in purchases(scenario, report) if each.name == "a link 2 times as fast")
    assert bought.throughput_gain > 0.8


@pytest.mark.long
def test_suggested_purchases_are_reported_with_their_gain() -> None:
    scenario = Scenario(profile_of(link_seconds=4.0, compute_row_seconds=0.01), kinds=(RequestKind(5, 30),))
    now = simulate(scenario)
    found = {each.name: each for each in purchases(scenario, now)}
    assert next(iter(found)) == "a link 2 times as fast"
    assert found["a link 2 times as fast"].throughput_gain > 0.4
    assert found["memory for a quarter of what streams"].throughput_gain > 0.15
    assert abs(found["1 more target"].throughput_gain) < 0.01, "one user has no use for it"
    assert "a network 2 times as near" not in found, "there is none"


def test_requests_that_fit_no_target_are_refused() -> None:
    scenario = Scenario(profile_of(link_seconds=1.0, max_context=100), kinds=(RequestKind(90, 20),))
    with pytest.raises(ConfigError, match="--mix: 90:20: must be at most 100 tokens, the target's context, got 110"):
        simulate(scenario)


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["simulate", *arguments])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_the_command_prints_a_table_or_one_json_line(capsys: pytest.CaptureFixture[str]) -> None:
    common = ("two-cores-resident", "--users", "1", "2", "--mix", "20:20", "--no-purchases")
    assert run(*common, "--json") == 0
    line = json.loads(capsys.readouterr().out)
    assert [each["num_users"] for each in line["runs"]] == [1, 2]
    assert line["runs"][0]["bottleneck"] == "the targets' computing"
    assert set(line["runs"][0]["latency"]) == {"p50", "p95", "p99"}
    assert run(*common) == 0
    assert "2 users, 1 target, 1 draft: the first bottleneck is the targets' computing" in capsys.readouterr().out
    assert run("list") == 0
    assert "rtx4090-70b-4bit: Calculated" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("nowhere",), "profile: must be a JSON file, or one of"),
        (("two-cores", "--users", "0"), "--users: must be a whole number, 1 to 100000, got '0'"),
        (("two-cores", "--users", "100001"), "--users: must be a whole number, 1 to 100000, got '100001'"),
        (("two-cores", "--users", "1", "many"), "--users: must be a whole number, 1 to 100000, got 'many'"),
        (("two-cores", "--targets", "0"), "--targets: must be a whole number, 1"),
        (("two-cores", "--drafts=-1"), "--drafts: must be a whole number, 0"),
        (("two-cores", "--mix", "200"), "--mix: must be PROMPT:OUTPUT or PROMPT:OUTPUT:WEIGHT, all above 0, got '200'"),
        (("two-cores", "--mix", "200:0"), "all above 0, got '200:0'"),
        (("two-cores", "--mix", "9:9:0"), "all above 0, got '9:9:0'"),
        (("two-cores", "--mix", "2000:200"), "--mix: 2000:200: must be at most 2048 tokens"),
        (("two-cores", "--think", "nan"), "--think: must be a number, 0"),
        (("two-cores", "--network", "-1"), "--network: must be a number, 0"),
        (("two-cores", "--nodes", "64"), "--nodes: must be given together with --depth"),
        (("two-cores", "--nodes", "4", "--depth", "4"), "--depth: must be below --nodes, 4, got 4"),
        (("two-cores", "--nodes", "513", "--depth", "4"), "--nodes: must be at most 512, the target's limit"),
    ],
)
def test_invalid_flags_are_refused(flags: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*flags) == 2
    assert said in capsys.readouterr().err
