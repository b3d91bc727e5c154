"""Models of the Hugging Face hub and its local cache.

Commands that start services fetch missing models; running services never do, since several of them open the same model
and none should take hours to become ready.
"""

from __future__ import annotations

import os
from pathlib import Path

from bough.errors import CheckpointError

WANTED = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt"]
UNWANTED = ["original/*", "consolidated*"]  # the same weights in their makers' formats


def is_hub_id(model: str | Path) -> bool:
    """Whether a string has the form "organisation/name" and no such folder exists."""
    is_spelt = str(model).count("/") == 1 and not str(model).startswith((".", "/", "~"))
    return is_spelt and not Path(model).is_dir()


def cached(model: str) -> Path:
    """The cached folder of a hub id.

    Raises:
        CheckpointError: it is not in the cache.
    """
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    cache = constants.HF_HUB_CACHE
    try:
        folder = Path(snapshot_download(model, cache_dir=cache, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError, ValueError) as exc:
        raise CheckpointError(
            f"model: must be a folder or a model in the local Hugging Face cache, got {model}; "
            "fetch models with `hf download`"
        ) from exc
    # Compared as spelled: symbolic links in the cache are made by its owner.
    if not Path(os.path.normpath(folder)).is_relative_to(os.path.normpath(cache)):
        raise CheckpointError(
            f"model: {model} must be in the Hugging Face cache, {cache}; its entry there points to {folder}"
        )
    return folder


def fetch(*models: str) -> None:
    """Fetch missing files of hub ids, with progress bars; without a connection, cached models must do.

    Raises:
        CheckpointError: a model can neither be fetched nor is cached.
    """
    ids = [model for model in dict.fromkeys(models) if is_hub_id(model)]
    if not ids:
        return
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    for model in ids:
        try:
            snapshot_download(model, allow_patterns=WANTED, ignore_patterns=UNWANTED)
        except LocalEntryNotFoundError:
            cached(model)  # raises if it is not cached
        except (HfHubHTTPError, HFValidationError, OSError) as exc:
            reason = (str(exc).strip() or repr(exc)).splitlines()[0]
            raise CheckpointError(f"model: {model} cannot be fetched: {reason}") from exc
