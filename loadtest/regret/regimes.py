"""Situations for sizers, as profiles of simulated workers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from bough.protocol.ids import ScopedId
from bough.simulation.acceptance_model import AcceptanceModel
from bough.simulation.profile import UNCHANGED, Experts, Factors, NetworkProfile, Profile, TargetProfile, load_profile
from bough.simulation.text_model import TextModel
from simulator.guesses import SeededText
from simulator.world import Session

NUM_WORDS, FIRST_WORD = 400, 10
PROMPT_TOKENS = 32
GOOD = AcceptanceModel("by_rank", (load_profile("l40-70b-16bit").acceptance.rows[0],), spread=0.5)
MEDIUM = load_profile("two-cores").acceptance
# A draft that is right for a third of the tokens, and overconfident.
WEAK = AcceptanceModel("by_rank", ((0.35, 0.08, 0.05, 0.03, 0.02, 0.01, 0.01, 0.01),), spread=0.3, overconfidence=1.5)
HOSTILE = AcceptanceModel("hostile", ((0.0,) * 8,))
EASY = AcceptanceModel("by_rank", ((0.92, 0.03, 0.01, 0.005),), spread=0.3)
HARD = AcceptanceModel("by_rank", ((0.3, 0.1, 0.05, 0.03, 0.02, 0.02, 0.01, 0.01),), spread=0.3)


def session_of(name: str, seed: int, acceptance: AcceptanceModel, num_tokens: int) -> Session:
    """A session with its own text, which does not depend on guesses."""
    return Session(
        ScopedId(name), SeededText(TextModel(acceptance, FIRST_WORD, NUM_WORDS), seed), PROMPT_TOKENS, num_tokens
    )


@dataclass(frozen=True, slots=True)
class Regime:
    """A situation, and a change in the middle of it."""

    name: str
    profile: Profile
    acceptances: tuple[AcceptanceModel, ...]  # of its concurrent sessions
    change: Factors = UNCHANGED  # applied once half of all tokens are generated

    @property
    def most_nodes(self) -> int:
        """The largest size of the grid: with many sessions, larger trees would overfill a shared sweep."""
        return 1 << 30 if len(self.acceptances) == 1 else 64

    def samples(self, seed: int, num_tokens: int) -> list[Session]:
        """The sessions' texts of one repeat, from a seed."""
        return [
            session_of(f"{seed}-{index}", seed * 1000 + index, each, num_tokens)
            for index, each in enumerate(self.acceptances)
        ]

    def factors(self, num_tokens_at: Callable[[], int], num_tokens: int) -> Callable[[], Factors]:
        """The present factors of seconds, by generated and total tokens."""
        return lambda: self.change if 2 * num_tokens_at() >= num_tokens else UNCHANGED


def _target(profile: Profile, **changes: object) -> Profile:
    return replace(profile, target=replace(profile.target, **changes))  # type: ignore[arg-type]


def _knee(rows: int, link_seconds: float) -> Profile:
    """A profile with a knee at `rows` rows, and a fast draft."""
    base = load_profile("rtx4090-70b-4bit")
    slope = 0.7 * link_seconds / rows
    target = TargetProfile(
        link_seconds=link_seconds, compute_base_seconds=0.3 * link_seconds, compute_row_seconds=slope, row_step=8,
        overhead_seconds=0.01, jitter=0.05, max_nodes=1024,
    )  # fmt: skip
    draft = replace(base.draft, base_seconds=0.01 * link_seconds, row_seconds=0.00005 * link_seconds)
    return replace(base, target=target, draft=draft)


def regimes() -> tuple[Regime, ...]:
    """All regimes, by the names used in results."""
    offloaded, resident = load_profile("two-cores"), load_profile("two-cores-resident")
    far = NetworkProfile(one_way_seconds=0.025)
    experts = Experts(miss_seconds=1.5, num_experts=64, experts_per_token=4)
    slow_draft = replace(offloaded.draft, base_seconds=0.15)
    return (
        Regime("good draft, offloaded", offloaded, (GOOD,)),
        Regime("weak draft, offloaded", offloaded, (WEAK,)),
        Regime("weak draft, resident", resident, (WEAK,)),
        Regime("hostile draft, offloaded", offloaded, (HOSTILE,)),
        Regime("hostile draft, resident", resident, (HOSTILE,)),
        Regime("knee at 8 rows", _knee(8, 1.0), (MEDIUM,)),
        Regime("knee at 64 rows", _knee(64, 1.0), (MEDIUM,)),
        Regime("knee at 320 rows", _knee(320, 1.0), (GOOD,)),
        Regime("resident", resident, (MEDIUM,)),
        Regime("resident on a GPU", load_profile("all-resident"), (GOOD,)),
        Regime("slow link", load_profile("l40-70b-16bit"), (GOOD,)),
        Regime("slow draft", replace(offloaded, draft=slow_draft), (MEDIUM,)),
        Regime("network of 50 ms", replace(resident, network=far), (MEDIUM,)),
        Regime("4 sessions", offloaded, (MEDIUM,) * 4),
        Regime("16 sessions", _knee(64, 1.0), (MEDIUM,) * 16),
        Regime("easy and hard sessions", offloaded, (EASY, EASY, HARD, HARD)),
        Regime("link three times slower in mid-run", _knee(64, 0.5), (MEDIUM,), Factors(link=3.0)),
        Regime("a processor taken in mid-run", resident, (MEDIUM,), Factors(compute=2.0, draft=1.5)),
        Regime("mixture of experts", _target(offloaded, link_seconds=0.3, experts=experts), (MEDIUM,)),
    )
