"""Comparison of purchases: the scenario is simulated again with more or faster workers, memory or links."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import TypeVar

from bough.errors import ConfigError
from bough.simulation.profile import DraftProfile, NetworkProfile, Profile, TargetProfile
from simulator.capacity import simulate
from simulator.scenario import CapacityReport, Purchase, Scenario

RESIDENT_SHARE = 0.25  # share of the streamed weights that added memory holds
LINK_SPEED = 2.0  # speed-up of a link, as of the next generation of PCIe
SPEED = 2.0  # speed-up of a processor, draft or network; factor of KV memory

Part = TypeVar("Part", TargetProfile, DraftProfile, NetworkProfile)


def purchases(scenario: Scenario, now: CapacityReport) -> list[Purchase]:
    """All applicable changes, sorted by a user's gain in tokens per second, then by gain in latency."""
    found = []
    for name, changed in _changes(scenario):
        with suppress(ConfigError):  # with more KV memory so many are answered at once that none may end in time
            found.append(_purchase(name, simulate(changed), now))
    return sorted(found, key=lambda each: (-round(each.user_gain, 3), -each.p95_latency_gain))


def _purchase(name: str, after: CapacityReport, now: CapacityReport) -> Purchase:
    return Purchase(
        name,
        after.tokens_per_second,
        _gain(after.tokens_per_second, now.tokens_per_second),
        _gain(after.user_tokens_per_second, now.user_tokens_per_second),
        -_gain(after.latency.p95, now.latency.p95),
    )


def _gain(after: float, now: float) -> float:
    return after / now - 1 if now else 0.0


def _changes(scenario: Scenario) -> list[tuple[str, Scenario]]:
    profile, target = scenario.profile, scenario.profile.target

    def with_profile(changed: Profile) -> Scenario:
        return replace(scenario, profile=changed)

    def with_link(factor: float) -> Scenario:
        experts = replace(target.experts, miss_seconds=target.experts.miss_seconds * factor) if target.experts else None
        changed = replace(target, link_seconds=target.link_seconds * factor, experts=experts)
        return with_profile(replace(profile, target=changed))

    more = max(1, scenario.num_targets // 10)
    changes = [(f"{more} more target{'s' * (more > 1)}", replace(scenario, num_targets=scenario.num_targets + more))]
    more = max(1, scenario.num_drafts // 10) if scenario.num_drafts else scenario.num_targets
    changes.append((f"{more} more draft{'s' * (more > 1)}", replace(scenario, num_drafts=scenario.num_drafts + more)))
    if target.link_seconds or target.experts:
        changes.append((f"a link {LINK_SPEED:g} times as fast", with_link(1 / LINK_SPEED)))
        changes.append(("memory for a quarter of what streams", with_link(1 - RESIDENT_SHARE)))
    computing = replace(
        _faster(target, "compute_base_seconds", "compute_row_seconds"),
        compute_curve=tuple((rows, seconds / SPEED) for rows, seconds in target.compute_curve),
    )
    changes.append((f"targets that compute {SPEED:g} times as fast", with_profile(replace(profile, target=computing))))
    if scenario.num_drafts:
        drafting = _faster(profile.draft, "base_seconds", "row_seconds", "prefill_token_seconds")
        changes.append((f"drafts {SPEED:g} times as fast", with_profile(replace(profile, draft=drafting))))
    kv = replace(target, kv_tokens=int(target.kv_tokens * SPEED))
    changes.append((f"{SPEED:g} times the KV memory", with_profile(replace(profile, target=kv))))
    if profile.network.one_way_seconds:
        near = _faster(profile.network, "one_way_seconds")
        changes.append((f"a network {SPEED:g} times as near", with_profile(replace(profile, network=near))))
    return changes


def _faster(part: Part, *times: str) -> Part:
    """A copy of a part of a profile with these times divided by SPEED."""
    return replace(part, **{name: getattr(part, name) / SPEED for name in times})
