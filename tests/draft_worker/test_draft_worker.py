"""A real draft worker on a tiny model: its thread, many callers at once, and what it says of itself."""

from __future__ import annotations

import itertools
import os
import sys
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bough.errors import ConfigError, NotFound
from bough.model.kv.session_kv import KVMemory
from bough.model.running.runner import CaptureFailed, ResidentModel
from bough.protocol.ids import ScopedId
from bough.protocol.messages import GrowCall
from bough.protocol.sampling_params import SamplingParams
from bough.trees.tree_plan import BestFirst, Scheme, StaticShape, TreePlan
from draft_worker.candidates import noise
from tests.fakes.draft import grow_call, worker
from tests.fakes.waiting import block_until

pytestmark = pytest.mark.slow  # running services are called
PLANS = (
    TreePlan(BestFirst(16, 4, 4)),
    TreePlan(StaticShape((0, 0, 1, 1, 2, 3)), Scheme.WITHOUT_REPLACEMENT),
    TreePlan(StaticShape.chains(3, 3)),
    TreePlan(StaticShape.chains(2, 3), Scheme.TRAVERSAL),
)


def calls(num: int) -> list[GrowCall]:
    rng = np.random.default_rng(1)
    return [
        grow_call(
            rng.integers(0, 256, 5 + 7 * number).tolist(),
            sampling=SamplingParams(temperature=0.7, seed=number),
            plan=PLANS[number % len(PLANS)],
            session_id=f"session {number}",
        )
        for number in range(num)
    ]


def test_concurrent_callers_get_the_trees_that_they_get_alone(tiny: Path) -> None:
    """Rows of other sessions in a step change the rounding of one's own, and nothing else."""
    with worker(tiny) as draft:
        together = [future.result() for future in [draft.grow(call) for call in calls(9)]]
        assert draft.info().num_sessions == 9
    with worker(tiny) as draft:
        for call, result in zip(calls(9), together, strict=True):
            alone = draft.grow(call).result()
            assert result.tree.tokens.tolist() == alone.tree.tokens.tolist()
            assert result.tree.parents.tolist() == alone.tree.parents.tolist()
            assert result.tree.log_probs == pytest.approx(alone.tree.log_probs, abs=1e-3)
            assert result.held_length == alone.held_length == call.context.base_length


def test_a_draft_worker_reports_its_work_to_prometheus(tiny: Path) -> None:
    with worker(tiny) as draft:
        trees = [draft.grow(call).result().tree for call in calls(3)]
        with urllib.request.urlopen(f"http://127.0.0.1:{draft.metrics_port}/metrics", timeout=5) as reply:
            lines = reply.read().decode().splitlines()
        assert f"metrics at http://127.0.0.1:{draft.metrics_port}/metrics" in draft.info().notes
    told = {line.split("{")[0]: float(line.rsplit(" ", 1)[1]) for line in lines if not line.startswith("#")}
    assert told["bough_draft_trees_total"] == 3
    assert told["bough_draft_nodes_total"] == sum(len(tree) for tree in trees)
    assert told["bough_draft_sessions"] == 3
    assert told["bough_backend"] == 1
    assert told["bough_draft_steps_total"] >= 3
    assert told["bough_draft_step_seconds_total"] > 0
    assert told["vllm:num_requests_running"] == told["vllm:num_requests_waiting"] == 0
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"http://127.0.0.1:{draft.metrics_port}/metrics", timeout=5)


def test_a_metrics_port_in_use_is_named(tiny: Path) -> None:
    with (
        worker(tiny) as draft,
        pytest.raises(ConfigError, match="--metrics-port: cannot listen on"),
        worker(tiny, "--metrics-port", str(draft.metrics_port)),
    ):
        pass


def test_no_call_waits_for_a_compilation(tiny: Path) -> None:
    """What chooses nodes is compiled at the start, for all types that calls and draft-ahead bring."""
    kernels: list[Any] = [noise._raw_at]
    with worker(tiny, "--ahead-steps", "4") as draft:
        compiled = [len(kernel.signatures) for kernel in kernels]
        for plan, root, temperature in itertools.product(PLANS, (7, 8), (0.0, 0.7)):
            sampling = SamplingParams(temperature=temperature, seed=1)
            call = replace(grow_call([1, 2, 3], plan=plan, sampling=sampling, session_id="one"), root_token=root)
            assert len(draft.grow(call).result().tree) > 1
            block_until(lambda: not draft._engine.can_go_ahead)
        assert [len(kernel.signatures) for kernel in kernels] == compiled


def test_a_cancelled_and_a_released_call_do_not_affect_others(tiny: Path) -> None:
    with worker(tiny) as draft:
        gone, kept = (draft.grow(call) for call in calls(2))
        gone.cancel()
        assert len(kept.result().tree) > 1
        draft.release(ScopedId("session 1")).result()
        with pytest.raises(NotFound, match="'session 1' has no slot here"):
            draft.release(ScopedId("session 1")).result()


def test_draft_ahead_is_reported_and_changes_no_tree(tiny: Path) -> None:
    """The draft as its own target, greedy: outcomes are its decoding's continuation."""
    with worker(tiny, "--ahead-steps", "20") as ahead, worker(tiny) as cold:
        tokens = [3, 1, 4]
        for _ in range(6):
            result = ahead.grow(grow_call(tokens)).result()
            assert result.tree.tokens.tolist() == cold.grow(grow_call(tokens)).result().tree.tokens.tolist()
            node = int(np.argmax(result.tree.depths()))
            tokens = [*tokens, *(int(result.tree.tokens[step]) for step in result.tree.path(node)[1:]), 7]
        assert ahead.info().notes[0].startswith("draft-ahead: ")
        assert ahead.info().notes[0].endswith(" of 6 trees reused its expansions")
        assert cold.info().notes[:-1] == ahead.info().notes[1:-1]  # the last is where metrics are served
        assert cold.info().notes[0].startswith("guesses at temperature 0 are judged by the draft's probabilities to ")


def test_a_draft_whose_capture_fails_starts_again_without_graphs(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As the same command, in the same process for whoever supervises it."""

    class Replaced(BaseException):
        pass

    def captured(self: ResidentModel, memory: KVMemory, is_captured: bool) -> None:
        if is_captured:
            raise CaptureFailed("no CUDA graph could be captured on cuda:0: it fails")

    def execve(program: str, command: list[str], environment: dict[str, str]) -> None:
        assert (program, command) == (sys.executable, [sys.executable, "-m", "draft_worker", "--model", "m"])
        monkeypatch.setattr(os, "environ", environment)
        raise Replaced

    monkeypatch.setattr(ResidentModel, "warm_up", captured)
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "draft_worker", "--model", "m"])
    monkeypatch.setattr(os, "execve", execve)
    with pytest.raises(Replaced), worker(tiny):
        pass
    assert "starting again without CUDA graphs: no CUDA graph could be captured on cuda:0: it fails" in caplog.text
    with worker(tiny) as draft:
        assert draft.info().max_sessions > 0
