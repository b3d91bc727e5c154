"""A head that starts again while its stages hold their layers."""

from __future__ import annotations

import pytest

from target_worker.stages.head import loaded_split
from target_worker.stages.roster import StageFigures


def test_a_restarted_head_keeps_the_split_that_its_stages_have_loaded() -> None:
    stages = [StageFigures(3, 5), StageFigures(5, 9)]
    assert loaded_split(stages, 9) == [range(3), range(3, 5), range(5, 9)]


@pytest.mark.parametrize(
    "stages",
    [
        [StageFigures(3, 5), StageFigures()],  # one was restarted too
        [StageFigures(), StageFigures()],
        [StageFigures(3, 5), StageFigures(6, 9)],  # of another model, or another number of stages
        [StageFigures(3, 5), StageFigures(5, 8)],
        [StageFigures(0, 5), StageFigures(5, 9)],
        [StageFigures(5, 9), StageFigures(3, 5)],
    ],
)
def test_other_layers_are_divided_anew(stages: list[StageFigures]) -> None:
    assert loaded_split(stages, 9) == []
