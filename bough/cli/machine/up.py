"""`bough up`: starts index, target, draft and orchestrator, and supervises them while it runs."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from bough.cli.machine.memory_division import divide, divide_gpu, draft_needs, on_one_gpu, require_kv, require_session
from bough.cli.planning.demonstration import STREAMED, placement_flags
from bough.client import Client
from bough.config.addresses import free_port, has_page, require_free_ports
from bough.config.cache_paths import (
    DEMONSTRATION_COPIES,
    SUBSTITUTE_DROPS,
    demonstration_folder,
    is_written,
    original_file,
)
from bough.config.processes import DraftConfig, OrchestratorConfig, TargetConfig, parse
from bough.errors import BoughError, CheckpointError, ConfigError, InvalidModel, InvalidSetting, PairingError
from bough.model import compiled_folder
from bough.model.checkpoint.checkpoint import Checkpoint
from bough.model.checkpoint.model_places import container_of, fetch, is_hub_id, resolve
from bough.processes.demonstration import ensure_demonstration
from bough.processes.launch import Settings, launched, supervised
from bough.processes.progress import QUESTION, Progress, activation, bough_command, curl_command
from bough.registry.connection import without_passwords
from bough.runtime.log_lines import report, say
from bough.runtime.machine import free_memory, may_be_gpu
from bough.security.access import Access
from bough.security.keys import read_keys
from bough.security.private_files import read_file
from bough.simulation.profile import load_profile, shipped_profiles
from bough.sizing.placement import gigabytes
from bough.tokenization.vocabulary import first_difference

HTTP_PORT = 8000  # the usual port of such servers
INDEX_VARIABLE = "BOUGH_ORCHESTRATOR_INDEX_URL"  # keeps a password from the command line
KEYS_VARIABLE = "BOUGH_ORCHESTRATOR_KEYS"
NO_DRAFT = "none"
DRAINING = "draining: running requests have {:g} s to finish; Ctrl-C again ends them at once"
DRAFT_FLAGS = {name: f"--draft-{name[2:]}" for name in ("--device", "--dtype", "--bits")}  # by the draft worker's names
MODEL_FLAGS = (
    "target", "drop_layers", "dtype", "device_memory", "kv_memory", "host_memory", "stages", "draft_bits",
    "draft_device", "draft_dtype",
)  # fmt: skip


async def up(arguments: argparse.Namespace) -> int:
    """Start all processes and restart ended ones until Ctrl-C or SIGTERM; then let running requests finish."""
    settings = settings_from(arguments)
    require_free_ports(settings.orchestrator.host, ports_of(settings.orchestrator))  # before any model is read
    require_files(settings)
    if not settings.target.simulate:
        if settings.target.kv_memory and not may_be_gpu(settings.target.device):
            require_kv(settings.target, settings.target.device_memory or free_memory())
        require_models(settings)
        if settings.target.kv_memory:
            target = settings.target
            require_session(target, draft_needs(DraftConfig(model=files_of(target.model), dtype=target.dtype)))
        if settings.draft is not None:
            require_pair(settings.target.model, settings.draft.model)
        if str(demonstration_folder()) in models_of(settings):
            await asyncio.to_thread(ensure_demonstration)  # Ctrl-C acts where a command awaits
        announce_first_start()
    settings = divided(settings, report)
    if placement_flags(settings.target.model, os.environ):
        report(STREAMED)
    progress = Progress()
    async with launched(settings, progress, draft_may_follow=True) as cluster, supervised(cluster, report):
        progress.clear()
        lines = await target_lines(cluster.client(), settings.target.model)
        index = without_passwords(cluster.index_url)
        print(f"ready: {cluster.address} (index {index}; logs in {cluster.folder})")  # nothing awaits before `wait`
        for line in lines:
            say(line)
        orchestrator, host = cluster.settings.orchestrator, cluster.address.rpartition(":")[0]
        print(f'try{activation()}: {bough_command("generate", cluster.address, orchestrator)} "{QUESTION}"')
        if orchestrator.http_port > 0:
            scheme = "https" if orchestrator.tls_cert else "http"
            url = f"{scheme}://{host}:{orchestrator.http_port}"
            if has_page(orchestrator):
                print(f"in a browser: {url}/ui")
            print(f"OpenAI's clients: base URL {url}/v1; or try:\n{curl_command(url, orchestrator)}")
        sys.stdout.flush()
        assert cluster.stop is not None, "launched processes are ended by signals"
        await cluster.stop.wait()
        with suppress(OSError):  # of a terminal that is closed
            report(DRAINING.format(orchestrator.drain_seconds))
    return 0


async def target_lines(client: Client, model: str) -> list[str]:
    """Lines on the longest session, its limit, and what streams; none if an API key is required.

    `bough plan` predicts the speed: processes that start together share the disk, and would measure too slow a link.
    """
    try:
        async with client:
            infos = [worker.info for worker in (await client.server_info()).workers if worker.info.kind == "target"]
    except BoughError:
        return []
    limits = {info.max_context: info.context_limit for info in infos}
    contexts = (
        f"context: {context} tokens of prompt and answer{f', limited by {limit}' if limit else ''}"
        for context, limit in limits.items()
    )
    hint = f"; `bough plan {model}` predicts the speed" if model else ""
    moved = {info.link_bytes_per_pass: None for info in infos}
    above = [f"warning: {note}" for info in infos for note in info.notes if note.startswith("--max-context: ")]
    return [*contexts, *above, *(f"every sweep moves {gigabytes(num_bytes)} of layers{hint}" for num_bytes in moved)]


def ports_of(config: OrchestratorConfig) -> dict[str, int]:
    """The ports that must be free, by flag."""
    return {"--port": config.port, "--http-port": config.http_port}


def require_files(settings: Settings) -> None:
    """Read the files of keys, secrets and certificates, so that errors are found before any process starts.

    Raises:
        ConfigError: names the setting of a file that cannot be used.
    """
    for config in (settings.target, settings.draft, settings.orchestrator):
        if config is not None:
            Access.of(config)
    if settings.orchestrator.keys:
        name = f"--keys ({KEYS_VARIABLE})"
        read_keys(f"{name}: {settings.orchestrator.keys}", read_file(name, settings.orchestrator.keys))


def require_models(settings: Settings) -> None:
    """Fetch models from the hub and open all models; an error names the flag of this command.

    Local models come first, as fetching takes long. A demonstration model that does not exist yet is skipped.

    Raises:
        CheckpointError: a model cannot be fetched, does not exist or is damaged.
    """
    flags = models_of(settings)
    if not is_written(demonstration_folder(), DEMONSTRATION_COPIES):
        flags.pop(str(demonstration_folder()), None)
    for model in sorted(flags, key=is_hub_id):
        with by_flag(flags[model]):
            fetch(model)
            Checkpoint.open(model)


@contextmanager
def by_flag(flag: str) -> Iterator[None]:
    """Make errors of the block name the flag that set the model."""
    try:
        yield
    except InvalidModel as exc:
        raise exc.named(flag) from exc


def models_of(settings: Settings) -> dict[str, str]:
    """The flags that name the models, by model."""
    flags = {settings.target.model: "--target"}
    if settings.draft is not None:
        flags.setdefault(settings.draft.model, "--draft")
    return flags


def require_pair(target: str, draft: str) -> None:
    """Compare the tokens in two models' files, without torch; the workers compare the rest.

    Raises:
        PairingError: a token differs.
    """
    ours, theirs = vocabulary_of(target), vocabulary_of(draft)
    length = min(len(ours), len(theirs))  # tokens that configurations add come after those of the files
    if target != draft and (difference := first_difference(theirs[:length], ours[:length])):
        raise PairingError(f"--draft: {draft} must have the tokenizer of {target}: {difference}")


def vocabulary_of(model: str) -> Sequence[str]:
    """The tokens in a model's own files; empty if there are none."""
    path = resolve(files_of(model))
    with suppress(OSError, ValueError, CheckpointError):  # a worker names the problem
        return container_of(path).tokens()
    return ()


def files_of(model: str) -> str:
    """The model, or the original from which a missing demonstration model will be written."""
    is_there = model != str(demonstration_folder()) or is_written(demonstration_folder(), DEMONSTRATION_COPIES)
    return model if is_there else str(original_file())


def settings_from(arguments: argparse.Namespace) -> Settings:
    """Settings from the flags of `bough up`, else from environment variables.

    Raises:
        ConfigError: names the invalid flag.
    """
    for name in ("target", "draft", "simulate", "drop_layers"):
        if getattr(arguments, name) == "":  # from an unset shell variable; it would select the demonstration
            raise ConfigError(f"--{name.replace('_', '-')}: must have a value, or be left out, got ''")
    target, draft = _simulated(arguments) if arguments.simulate else _workers(arguments)
    return Settings(
        target,
        draft,
        _orchestrator_config(arguments, has_draft=draft is not None),
        arguments.index_url or os.environ.get(INDEX_VARIABLE, ""),
    )


def _workers(arguments: argparse.Namespace) -> tuple[TargetConfig, DraftConfig | None]:
    """Settings of workers with models."""
    target = arguments.target or os.environ.get("BOUGH_TARGET_MODEL")
    draft = arguments.draft or os.environ.get("BOUGH_DRAFT_MODEL")
    drops = arguments.drop_layers or os.environ.get("BOUGH_DRAFT_DROP_LAYERS")
    if draft is None and drops is None:
        if os.environ.get("BOUGH_ORCHESTRATOR_DRAFT") == NO_DRAFT:
            draft = NO_DRAFT
        elif target is None:
            drops = SUBSTITUTE_DROPS
    target = target or str(demonstration_folder())
    target_flags = ["--model", target, *_flag_if_set("--dtype", arguments.dtype)]
    for name in ("max_context", "device_memory", "kv_memory", "host_memory", "stages"):
        target_flags += _flag_if_set(f"--{name.replace('_', '-')}", getattr(arguments, name))
    target_flags += placement_flags(target, os.environ)
    target_config = parse(TargetConfig, "target_worker", target_flags, os.environ)
    return target_config, _draft_config(arguments, target_config, draft, drops)


def _simulated(arguments: argparse.Namespace) -> tuple[TargetConfig, DraftConfig | None]:
    """Settings of simulated workers: target and draft, or the target alone with `--draft none`."""
    for name in MODEL_FLAGS:
        if (value := getattr(arguments, name)) is not None:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag}: must not be given with --simulate, which has no model, got {value}")
    if arguments.draft not in (None, NO_DRAFT):
        raise ConfigError(f"--draft: must be none or not given with --simulate, got {arguments.draft}")
    profile = arguments.simulate
    load_profile(profile)  # raises for an invalid profile before anything starts
    path = Path(profile)
    flags = ["--simulate", profile if profile in shipped_profiles() else str(path.absolute())]
    flags += _flag_if_set("--max-context", arguments.max_context)
    target = parse(TargetConfig, "target_worker", flags, os.environ)
    if arguments.draft is not None:
        return target, None
    flags += _flag_if_set("--ahead-steps", arguments.ahead_steps)
    return target, parse(DraftConfig, "draft_worker", flags, os.environ)


def _orchestrator_config(arguments: argparse.Namespace, has_draft: bool) -> OrchestratorConfig:
    flags = ["--draft", "workers" if has_draft else NO_DRAFT, *_flag_if_set("--port", arguments.port)]
    flags += [*_flag_if_set("--planner", arguments.planner), *_flag_if_set("--http-port", arguments.http_port)]
    config = parse(OrchestratorConfig, "orchestrator", flags, os.environ)
    if config.http_port == 0:  # chosen once, to stay the same after a restart
        return replace(config, http_port=free_port(config.host, HTTP_PORT if config.port != HTTP_PORT else 0))
    return config


def _draft_config(
    arguments: argparse.Namespace, target: TargetConfig, draft: str | None, drops: str | None
) -> DraftConfig | None:
    """Settings of the draft worker; None if there is none."""
    if draft == NO_DRAFT:
        if drops is not None:
            raise ConfigError(f"--drop-layers: must not be given with --draft none, got {drops}")
        return None
    if drops is None and draft is None:
        if not is_hub_id(target.model):
            with by_flag("--target"):
                resolve(target.model)
        raise ConfigError(
            "--draft: missing; must be a smaller model with the same tokenizer, or none for prompt lookup only; or "
            "--drop-layers, for the target itself without some layers"
        )
    flags = ["--model", draft or target.model, *_flag_if_set("--drop-layers", drops)]
    flags += [*_flag_if_set("--device", arguments.draft_device), *_flag_if_set("--dtype", arguments.draft_dtype)]
    flags += [*_flag_if_set("--bits", arguments.draft_bits), *_flag_if_set("--ahead-steps", arguments.ahead_steps)]
    if "BOUGH_DRAFT_MAX_CONTEXT" not in os.environ:
        flags += ["--max-context", str(target.max_context)]  # with less it would see only part of long sessions
    try:
        config = parse(DraftConfig, "draft_worker", flags, os.environ)
    except InvalidSetting as exc:
        raise exc.named(DRAFT_FLAGS.get(exc.field, exc.field)) from exc
    if config.ahead_steps < 0 and _gpu(config.device) == _gpu(target.device):
        return replace(config, ahead_steps=0)  # drafting ahead would delay the target's sweeps
    return config


def _gpu(device: str) -> str:
    """A device as torch numbers it; `auto` counts as the first GPU."""
    return "cuda:0" if device in ("auto", "cuda") else device


def _flag_if_set(flag: str, value: str | int | None) -> list[str]:
    return [] if value is None else [flag, str(value)]


def announce_first_start() -> None:
    """Announce the compilation of kernels if none are cached."""
    if not next(compiled_folder().rglob("*.nbc"), None):
        print(
            "the first start compiles kernels for this processor, which takes about 20 s on two cores",
            file=sys.stderr,
        )


def divided(settings: Settings, report: Callable[[str], None]) -> Settings:
    """Settings with a memory budget for each worker; `report` is called with the division.

    Settings with a GPU or a simulated worker are returned unchanged, as such workers set their own budgets. The
    exception is two workers on one GPU: the target's budget leaves the draft its share, whichever starts first.

    Raises:
        ConfigError: there is too little memory.
        CheckpointError: the draft's model is missing or damaged.
    """
    target, draft = settings.target, settings.draft
    if not target.simulate and draft is not None and on_one_gpu(target, draft):
        shared = divide_gpu(target, draft, draft_needs(draft))
        report(shared.words)
        return replace(settings, target=shared.target, draft=shared.draft)
    if target.simulate or may_be_gpu(target.device) or (draft is not None and may_be_gpu(draft.device)):
        return settings
    needs = draft_needs(draft) if draft is not None else None
    division = divide(free_memory(), target, draft, needs, has_index=not settings.index_url)
    report("\n".join(division.lines()))
    return replace(settings, target=division.target, draft=division.draft)
