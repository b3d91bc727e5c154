"""A stage that does not fit its head, and settings that fit nothing: each ends, or waits, and says what is wrong."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest

from bough.concurrency.tasks import background
from bough.config.addresses import free_port
from bough.config.processes import TargetConfig, parse
from bough.errors import ConfigError, NotFound, PairingError
from bough.model.checkpoint.checkpoint import Checkpoint
from bough.model.checkpoint.model_places import load_tokenizer_files
from bough.model.sizes.target_limits import KVRoom
from bough.rpc.server import serving
from bough.rpc.services import GENERATION, STAGES, TARGET, add_service
from bough.security.access import OPEN, Access
from bough.sizing.stage_split import StageRoom
from loadtest.common.tiny_model import TINY, save_model
from target_worker.__main__ import require_one_way
from target_worker.service import TargetService
from target_worker.stages import stage_worker
from target_worker.stages.head import StagesHead
from target_worker.stages.measured import facts_of
from target_worker.stages.ring import Ring
from target_worker.stages.roster import Roster
from target_worker.stages.service import StagesService
from target_worker.stages.stage_worker import serve_stage
from target_worker.sweep.held_layers import HeldLayers
from tests.fakes.waiting import until

pytestmark = pytest.mark.slow

ROOM = StageRoom("a machine", 10**9, 1e9, 0.01)


def config_of(model: Path | str, *flags: str) -> TargetConfig:
    """Settings of a target of two machines, or of its stage."""
    return parse(TargetConfig, "t", ["--model", str(model), "--port", "0", "--dtype", "float32", *flags], {})


@pytest.fixture
async def head(tiny: Path) -> AsyncIterator[str]:
    """The address of a head with the tiny model, which waits for its stage."""
    checkpoint = Checkpoint.open(str(tiny))
    whole = HeldLayers(config_of(tiny), checkpoint)
    facts = facts_of(whole, checkpoint.fingerprint(), load_tokenizer_files(tiny).fingerprint)
    async with served(STAGES, StagesService(Ring(OPEN, is_head=True), Roster(facts, 2))) as address:
        yield address


@pytest.fixture(autouse=True)
def _room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_worker, "room_of", lambda *_: ROOM)  # which takes seconds to measure


@asynccontextmanager
async def served(service: object, servicer: object, access: Access = OPEN) -> AsyncIterator[str]:
    """A server of one service; its address."""
    add = partial(add_service, service, servicer)
    name = service.full_name  # type: ignore[attr-defined]
    serves = serving("127.0.0.1", 0, name, add, auth_interceptors=access.auth_interceptors, grace_seconds=0.0)
    async with serves as server:
        yield f"127.0.0.1:{server.port}"


def other_weights(tiny: Path, folder: Path) -> list[str]:
    return ["--model", str(save_model(folder / "other", TINY, seed=1))]


def other_tokenizer(tiny: Path, folder: Path) -> list[str]:
    shutil.copytree(tiny, folder / "other")
    file = folder / "other" / "tokenizer.json"
    whole = json.loads(file.read_text())
    whole["model"]["vocab"] = {word[::-1] * 2: number for word, number in whole["model"]["vocab"].items()}
    file.write_text(json.dumps(whole))
    return ["--model", str(folder / "other")]


@pytest.mark.parametrize(
    ("flags", "field", "values"),
    [
        (other_weights, "checkpoint", "'[0-9a-f]{24}' as at the head, got '[0-9a-f]{24}'"),
        (other_tokenizer, "tokenizer", "'[0-9a-f]+' as at the head, got '[0-9a-f]+'"),
        (lambda *_: ["--dtype", "bfloat16"], "dtype", "'float32' as at the head, got 'bfloat16'"),
        (lambda *_: ["--backend", "reference"], "code", "'[0-9a-f]+' as at the head, got '[0-9a-f]+'"),
    ],
)
async def test_a_stage_that_differs_ends_with_the_field_and_both_values(
    head: str,
    tiny: Path,
    tmp_path: Path,
    flags: Callable[[Path, Path], list[str]],
    field: str,
    values: str,
) -> None:
    config = config_of(tiny, "--stage-of", head, *flags(tiny, tmp_path))
    with pytest.raises(PairingError, match=rf"^{field}: must be {values} at 127.0.0.1:\d+$"):
        await serve_stage(config)


@pytest.mark.parametrize("service", [TARGET, GENERATION])
async def test_an_address_that_is_not_a_heads_is_refused(tiny: Path, service: object) -> None:
    """That of a target of one machine, or of an orchestrator."""
    async with served(service, TargetService() if service is TARGET else object()) as address:
        message = f"^--stage-of: must be the address of a target with --stages, got {address}$"
        with pytest.raises(NotFound, match=message):
            await serve_stage(config_of(tiny, "--stage-of", address))


async def test_a_wrong_worker_key_is_logged_while_the_stage_waits(
    tiny: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The key may be changed one machine at a time, so the stage does not end."""
    caplog.set_level(logging.INFO)
    files = [tmp_path / name for name in ("ours", "theirs")]
    for file, letter in zip(files, "ab", strict=True):
        file.touch(0o600)
        file.write_text(letter * 64)
    guarded = Access.of(config_of(tiny, "--worker-key-file", str(files[1])))
    async with served(STAGES, StagesService(Ring(OPEN, is_head=True)), guarded) as address:
        for flags in (["--worker-key-file", str(files[0])], []):
            caplog.clear()
            async with background(serve_stage(config_of(tiny, "--stage-of", address, *flags))):
                await until(lambda: "BOUGH_WORKER_KEY_FILE must have the same key on all machines" in caplog.text)


async def test_a_stage_waits_for_a_head_that_does_not_listen(tiny: Path, caplog: pytest.LogCaptureFixture) -> None:
    nobody = f"127.0.0.1:{free_port('127.0.0.1')}"
    async with background(serve_stage(config_of(tiny, "--stage-of", nobody))):
        await until(lambda: f"the head at {nobody} does not answer: nothing listens there" in caplog.text)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model", "m", "--stage-of", "x"], "^--stage-of: must be HOST:PORT, got 'x'$"),
        (["--model", "m", "--stages", "0"], "^--stages: must be a whole number, 1 or more, got '0'$"),
        (
            ["--simulate", "l40-70b-4bit", "--stages", "2"],
            "^--simulate: must be left out with --stages, got l40-70b-4bit$",
        ),
        (
            ["--simulate", "l40-70b-4bit", "--stage-of", "h:1"],
            "^--simulate: must be left out with --stage-of, got l40-70b-4bit$",
        ),
        (
            ["--model", "m", "--stages", "3", "--stage-of", "h:1"],
            "^--stages: must be left out with --stage-of, got 3$",
        ),
    ],
)
def test_settings_that_contradict_are_refused(flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        require_one_way(parse(TargetConfig, "t", flags, {}))


async def test_more_stages_than_layers_are_refused_before_any_joins(tiny: Path) -> None:
    config = config_of(tiny, "--stages", "9")
    with pytest.raises(ConfigError, match=r"^--stages: must be at most 4, as each has a layer .*, got 9$"):
        StagesHead(config).split(HeldLayers(config, Checkpoint.open(str(tiny))), ROOM, KVRoom(1, 1), config)
