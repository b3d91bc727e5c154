"""Shipped profiles of GPUs have the seconds that `bough plan` predicts, by the command that their source states."""

from __future__ import annotations

import pytest

from bough.simulation.profile import load_profile
from tests.simulation.calculated_profiles import FROM_PAPERS, NAMES, calculated


@pytest.mark.parametrize("name", NAMES)
def test_a_simulated_gpu_takes_the_planned_seconds(name: str) -> None:
    """A 70B on a 4090 took 0.76, 1.05 and 1.22 s a sweep in three places.

    `python -m tests.simulation.calculated_profiles` writes profiles again.
    """
    profile = load_profile(name)
    target, (fields, sweep) = profile.target, calculated(name, profile.source)
    for rows, seconds in fields["compute_curve"]:
        assert target.compute_seconds(rows) == pytest.approx(seconds, rel=0.03)
    if name not in FROM_PAPERS:
        assert profile.source.startswith("Calculated, never measured, by `bough plan ")
        assert target.kv_tokens == pytest.approx(fields["kv_tokens"], rel=0.03)
        for rows in (1, 64, 256, 1024, 4096):
            assert target.sweep_seconds(rows) == pytest.approx(sweep.seconds(rows), rel=0.03)
