"""What a start is made of, and what workers do not import for it."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bough.processes.process import Stages, process_age_seconds


def test_stages_are_logged_and_add_up(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        stages = Stages(2.0)
        stages.enter("reading weights")
        stages.enter("warming up")
        stages.finish()
    assert [record.getMessage() for record in caplog.records[:2]] == ["reading weights", "warming up"]
    line = caplog.records[-1].getMessage()
    parts = {name: float(seconds) for name, seconds in re.findall(r"(\w[\w ]*) ([\d.]+) s", line.partition(": ")[2])}
    assert list(parts) == ["imports", "reading weights", "warming up"]
    assert parts["imports"] >= 2.0
    total = float(re.findall(r"after ([\d.]+) s", line)[0])
    assert total == pytest.approx(sum(parts.values()), abs=0.03)


def test_a_process_knows_its_age() -> None:
    code = "import time; time.sleep(0.3); from bough.processes.process import process_age_seconds as age; print(age())"
    assert float(subprocess.check_output([sys.executable, "-c", code])) >= 0.3
    assert process_age_seconds() > 0


@pytest.mark.long
def test_workers_build_a_model_without_the_compiler_and_distributed_tensors(tiny: Path) -> None:
    """They took a third of the imports, and 140 MB; a model that is built so computes with its buffers in place."""
    code = f"""
import sys
import draft_worker.__main__, target_worker.__main__
from bough.config.processes import DraftConfig, TargetConfig, parse
for module, kind in ((target_worker, TargetConfig), (draft_worker, DraftConfig)):
    module.__main__.model_parts(parse(kind, "w", ["--model", {str(tiny)!r}], {{}}), "w")
import torch
from bough.model.checkpoint.checkpoint import Checkpoint
from bough.model.loading.loading import build_skeleton
skeleton = build_skeleton(Checkpoint.open({str(tiny)!r}), torch.float32)
assert all(parameter.is_meta for parameter in skeleton.model.parameters())
assert all(not buffer.is_meta and buffer.isfinite().all() for buffer in skeleton.model.buffers())
heavy = ("torch._dynamo", "torch._inductor", "sympy", "torch.distributed.tensor", "botocore")
print([name for name in heavy if name in sys.modules])
import torch._dynamo
assert torch._dynamo.__file__, "whoever wants the compiler later gets the real one"
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines()[-1] == "[]"
