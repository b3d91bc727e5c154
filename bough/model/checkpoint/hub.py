"""Models of the Hugging Face hub and the local cache of them.

Whoever starts something has what is missing fetched; a service that has been started never does, as several of them
open the same model, and none should take hours before it can say that it is there.
"""

from __future__ import annotations

import os
from pathlib import Path

from bough.errors import CheckpointError

WANTED = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt"]
UNWANTED = ["original/*", "consolidated*"]  # the same weights once more, as their makers store them


def is_hub_id(model: str | Path) -> bool:
    """Whether it is spelt like "organisation/name", and no folder is there."""
    is_spelt = str(model).count("/") == 1 and not str(model).startswith((".", "/", "~"))
    return is_spelt and not Path(model).is_dir()


def cached(model: str) -> Path:
    """The folder of a hub id's files in the local cache.

    Raises:
        CheckpointError: it is not there.
    """
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    cache = constants.HF_HUB_CACHE
    try:
        folder = Path(snapshot_download(model, cache_dir=cache, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError, ValueError) as exc:
        raise CheckpointError(
            f"model: {model} is neither a folder nor a model in the local Hugging Face cache; "
            "a path, or a model fetched with `hf download`, would do"
        ) from exc
    # As it is spelled: a link in the cache is its owner's doing.
    if not Path(os.path.normpath(folder)).is_relative_to(os.path.normpath(cache)):
        raise CheckpointError(
            f"model: {model} must be in the Hugging Face cache, {cache}; its entry there points to {folder}"
        )
    return folder


def fetch(*models: str) -> None:
    """Has what the cache lacks of hub ids fetched, with progress bars; without a connection the cache has to do.

    Raises:
        CheckpointError: a model is neither to be had nor in the cache.
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
            cached(model)  # says what would do
        except (HfHubHTTPError, HFValidationError, OSError) as exc:
            reason = (str(exc).strip() or repr(exc)).splitlines()[0]
            raise CheckpointError(f"model: {model} cannot be fetched: {reason}") from exc
