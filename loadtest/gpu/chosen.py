"""Sweeps the trees that an orchestrator would send on this machine, for published acceptance; part of `loadtest.gpu`.

The sizer is the orchestrator's, with its defaults. It learns from one long text in simulated time (`simulator.world`),
with the seconds of sweeps and of a draft step measured here, and the acceptance of Llama-3-70B-Instruct's 8B draft
(Sequoia, arXiv 2402.12374, appendix E), equal at all positions. Then a tree of the size that the sizer chose is swept.
Seconds per token follow from that sweep and from the text's later rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import mean
from typing import Any, NamedTuple

from bough.config.processes import OrchestratorConfig
from bough.protocol.decision import Decision
from bough.protocol.generation import Speculation
from bough.protocol.ids import ScopedId
from bough.simulation.acceptance_model import PUBLISHED, AcceptanceModel
from bough.simulation.profile import DraftProfile, Profile, TargetProfile
from bough.sizing.row_counts import RowCounts
from bough.trees.tree import Tree
from bough.trees.tree_plan import BestFirst
from loadtest.regret.regimes import session_of
from orchestrator.sizing.plans import Proposal, RoundOutcome
from orchestrator.sizing.tree_sizer import TreeSizer
from simulator.world import World

ACCEPTANCE = "llama-3-70b-8b-cnn-dailymail"
LAYERS_OF_70B = 80
TO_BEAT = {  # published seconds per token of a 70B, by the bits of its weights
    16: {
        "Sequoia, 70B/8B, L40": 0.60,
        "Sequoia's best, L40": 0.56,
        "Sequoia, 70B, RTX 4090": 0.57,
        "SpecExec, 70B/8B, A100": 1 / 2.94,
    },
    4: {
        "UMbreLLa, 70B, L40, not offloaded": 1 / 38.5,
        "UMbreLLa, 70B, RTX 4090": 1 / 8.6,
        "UMbreLLa, 70B, RTX 4070 Ti": 1 / 6.1,
        "SpecExec, 70B/7B, RTX 4090": 1 / 5.66,
        "SpecExec, 70B/7B, A100": 1 / 6.17,
    },
}


class SweepSeconds(NamedTuple):
    """Seconds of a measured sweep."""

    total: float
    waiting: float  # of those, for layers


class _Round(NamedTuple):
    tree: Tree  # as sent
    decision: Decision


class _WatchedSizer(TreeSizer):
    """The sizer with an orchestrator's defaults, which keeps its rounds."""

    def __init__(self) -> None:
        config = OrchestratorConfig()
        super().__init__(BestFirst(config.budget, config.width, config.depth), config.max_depth)
        self.rounds: list[_Round] = []
        self._sent = Tree.root(0)

    def propose(self, session_id: ScopedId, drafted: Tree, looked_up: Tree) -> Proposal:
        proposal = super().propose(session_id, drafted, looked_up)
        self._sent = proposal.tree
        return proposal

    def observe(self, session_id: ScopedId, outcome: RoundOutcome) -> Decision | None:
        decision = super().observe(session_id, outcome)
        assert decision is not None, "all rounds are planned"
        self.rounds.append(_Round(self._sent, decision))
        return decision


def chosen(
    bits: int,
    num_layers: int,
    swept: Mapping[int, SweepSeconds],
    rows: RowCounts,
    step_seconds: float,
    num_tokens: int,
    sweep: Callable[[Tree], float],
) -> dict[str, Any]:
    """The tree that the sizer settles on and its seconds per token; `sweep` sweeps a tree and returns the seconds.

    `swept` are measured sweeps by tokens, `rows` how these were padded; the text has `num_tokens`. Only a target with a
    70B's `num_layers` is compared with published figures.
    """
    settled = _settled_rounds(_profile(swept, rows, step_seconds), num_tokens)
    tree = sorted((each.tree for each in settled), key=len)[len(settled) // 2]
    tokens, draft_seconds = (
        mean(values) for values in zip(*((d.tokens, d.seconds.draft) for _, d in settled), strict=True)
    )
    sweep_seconds = sweep(Tree.of(range(len(tree)), tree.parents.tolist(), [0.0] * len(tree)))  # tokens of any model
    seconds = (draft_seconds + sweep_seconds) / tokens
    compared = TO_BEAT[bits] if num_layers == LAYERS_OF_70B else {}
    return {
        "bits": bits,
        "layers": num_layers,
        "by": "the orchestrator's sizer, over the published acceptance",
        "nodes": len(tree),
        "levels": int(tree.depths().max()),
        "tokens_a_round": round(tokens, 2),
        "draft_seconds": round(draft_seconds, 4),
        "sweep_seconds": round(sweep_seconds, 4),
        "sweep_expected_seconds": round(mean(d.expected.sweep for _, d in settled), 4),
        "seconds_a_token": round(seconds, 4),
        "plain_seconds_a_token": round(swept[min(swept)].total, 4),
        "times_as_fast_as": {name: round(theirs / seconds, 2) for name, theirs in compared.items()},
    }


def _settled_rounds(profile: Profile, num_tokens: int) -> Sequence[_Round]:
    """The later half of a text's rounds, without the last, which may be cut off."""
    sizer = _WatchedSizer()
    World(profile, sizer, Speculation(), seed=0).run([session_of("text", 0, profile.acceptance, num_tokens)])
    return sizer.rounds[len(sizer.rounds) // 2 : -1]


def _profile(swept: Mapping[int, SweepSeconds], rows: RowCounts, step_seconds: float) -> Profile:
    """Simulated workers that take the measured seconds.

    A sweep that waited for layers took as long as its link; the rest is what it computed.
    """
    computed: dict[int, float] = {}
    for tokens, seconds in sorted(swept.items()):
        computed[rows.padded(tokens)] = max(0.0, seconds.total - seconds.waiting, *computed.values())
    if len(computed) == 1:  # twice the rows are twice the work
        ((least, seconds_of_least),) = computed.items()
        computed[2 * least] = 2 * seconds_of_least
    target = TargetProfile(
        link_seconds=min((s.total for s in swept.values() if s.waiting > 0), default=0.0),
        compute_curve=tuple(computed.items()),
        row_step=rows.step,
        max_nodes=max(swept),
    )
    acceptance = AcceptanceModel("by_rank", (PUBLISHED[ACCEPTANCE],))
    return Profile("measured by loadtest.gpu", target, DraftProfile(base_seconds=step_seconds), acceptance)
