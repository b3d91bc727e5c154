"""The comparison of a target on the CPU with what it was at a commit."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from loadtest.sweep import same_bits


def run(monkeypatch: pytest.MonkeyPatch, *flags: str) -> int:
    monkeypatch.setattr(sys, "argv", ["same_bits", *flags])
    with pytest.raises(SystemExit) as ended:
        same_bits.main()
    assert isinstance(ended.value.code, int)
    return ended.value.code


@pytest.mark.long
def test_a_trees_bits_are_reproduced(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Sweeps really run in it, in processes of their own."""
    monkeypatch.setattr(same_bits, "exported", lambda *_: same_bits.HERE)
    assert run(monkeypatch, "--commit", "then", "--cases", "olmo2 float32") == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["same"]
    num_rows = 2 * 40 + 2
    assert report["cases"] == [
        {"case": "olmo2 float32", "logits": num_rows * 512, "different": 0, "largest_difference": 0.0}
    ]


def test_one_different_bit_is_detected(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(same_bits, "exported", lambda _, folder: folder)

    def logits(tree: Path, *_: object) -> np.ndarray:
        found = np.ones((2, 3), np.float32)
        if tree != same_bits.HERE:
            found[1, 2] = np.nextafter(np.float32(1), np.float32(2))
        return found

    monkeypatch.setattr(same_bits, "logits", logits)
    assert run(monkeypatch, "--commit", "then", "--cases", "olmo2 float32") == 1
    (row,) = json.loads(capsys.readouterr().out.splitlines()[-1])["cases"]
    assert (row["logits"], row["different"]) == (6, 1)


def test_invalid_cases_are_refused_by_name(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "--commit", "then", "--cases", "olmo3 float32") == 2
    assert "--cases must be of llama bfloat16, " in (told := capsys.readouterr().err)
    assert "got olmo3 float32; see" in told
