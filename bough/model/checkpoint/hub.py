"""Models of the Hugging Face hub and its local cache.

Commands that start services fetch missing models; running services never do, since several of them open the same model
and none should take hours to become ready.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from bough.errors import CheckpointError
from bough.model.checkpoint.gguf_file import files_of, is_gguf
from bough.processes.signals import ended_by_ctrl_c

WANTED = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt"]
UNWANTED = ["original/*", "consolidated*"]  # the same weights in their makers' formats


def is_hub_id(model: str | Path) -> bool:
    """Whether a string has the form "organisation/name", or with a GGUF file "organisation/name/file", and is no path
    that exists.
    """
    num_slashes = str(model).count("/")
    is_spelt = num_slashes >= 2 if is_gguf(model) else num_slashes == 1
    return is_spelt and not str(model).startswith((".", "/", "~")) and not Path(model).exists()


def cached(model: str) -> Path:
    """The cached folder of a hub id, or the cached file.

    Raises:
        CheckpointError: it is not in the cache.
    """
    from huggingface_hub import constants, hf_hub_download, snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    cache = constants.HF_HUB_CACHE
    try:
        if is_gguf(model):
            found = [hf_hub_download(*file, cache_dir=cache, local_files_only=True) for file in _files(model)]
            folder = Path(found[0])
        else:
            folder = Path(snapshot_download(model, cache_dir=cache, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError, ValueError) as exc:
        raise CheckpointError(
            f"model: must be a folder or a model in the local Hugging Face cache, got {model}, of which {cache} has no "
            "revision (refs/main and its snapshot); fetch models with `hf download`"
        ) from exc
    # Compared as spelled: symbolic links in the cache are made by its owner.
    if not Path(os.path.normpath(folder)).is_relative_to(os.path.normpath(cache)):
        raise CheckpointError(
            f"model: {model} must be in the Hugging Face cache, {cache}; its entry there points to {folder}"
        )
    return folder


def _files(model: str) -> list[tuple[str, str]]:
    """The file of a hub id, or all of a split model, each with its repository."""
    organisation, name, file = model.split("/", 2)
    return [(f"{organisation}/{name}", each.as_posix()) for each in files_of(Path(file))]


def fetch(*models: str) -> None:
    """Fetch missing files of hub ids, with progress bars at a terminal; without a connection, cached models must do.

    For commands that have nothing to clean up yet: Ctrl-C meanwhile ends the process at once.

    Raises:
        CheckpointError: a model can neither be fetched nor is cached.
    """
    ids = [model for model in dict.fromkeys(models) if is_hub_id(model)]
    if not ids:
        return
    from huggingface_hub import hf_hub_download, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    for model in ids:
        try:
            with ended_by_ctrl_c():
                if is_gguf(model):
                    for file in _files(model):
                        hf_hub_download(*file)
                else:
                    snapshot_download(model, allow_patterns=WANTED, ignore_patterns=UNWANTED)
        except LocalEntryNotFoundError as exc:
            try:
                cached(model)
            except CheckpointError as missing:
                raise CheckpointError(f"{missing}; the hub cannot be reached from here") from exc
        except (HfHubHTTPError, HFValidationError, OSError) as exc:
            reason = (str(exc).strip() or repr(exc)).splitlines()[0]
            raise CheckpointError(f"model: {model} cannot be fetched: {reason}") from exc
