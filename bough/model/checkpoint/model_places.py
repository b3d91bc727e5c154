"""Finds models: folders and GGUF files here, and those of the Hugging Face hub in its local cache.

Commands that start services fetch missing models; running services never do, since several of them open the same model
and none should take hours to become ready.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from bough.errors import CheckpointError, InvalidModel
from bough.model.checkpoint.container import Container
from bough.model.checkpoint.gguf_file import SUFFIX
from bough.model.checkpoint.gguf_model import GgufModel
from bough.model.checkpoint.safetensors_folder import SafetensorsFolder
from bough.processes.signals import ended_by_ctrl_c
from bough.tokenization.vocabulary import TokenizerFiles


def container_of(model: str | Path) -> Container:
    """The container of a model by its path or hub id, whether it exists or not."""
    return (GgufModel if str(model).endswith(SUFFIX) else SafetensorsFolder)(Path(model))


def resolve(model: str | Path) -> Path:
    """The folder or GGUF file of a model: a local one itself, or that of a hub id in the cache.

    Raises:
        CheckpointError: there is none.
    """
    path = Path(model).expanduser()
    if container_of(path).exists():
        return path
    if not is_hub_id(model):
        raise InvalidModel("model", "must be a folder or a GGUF file that exists, or a hub id", model)
    return cached(str(model))


def load_tokenizer_files(path: Path) -> TokenizerFiles:
    """Read the tokenizer of a folder or a GGUF file.

    Raises:
        CheckpointError: there is no usable tokenizer.
    """
    try:
        return container_of(path).tokenizer_files()
    except (OSError, ValueError, AttributeError, LookupError) as exc:
        reason = " ".join(str(exc).split())
        raise CheckpointError(
            f"{path}: must have a tokenizer.json, or another tokenizer that transformers can read, got: {reason}"
        ) from exc


def is_hub_id(model: str | Path) -> bool:
    """Whether a string has the form "organisation/name", or with a GGUF file "organisation/name/file", and is not an
    existing path.
    """
    is_spelt = container_of(model).is_hub_id(str(model))
    return is_spelt and not str(model).startswith((".", "/", "~")) and not Path(model).exists()


def cached(model: str) -> Path:
    """The cached folder of a hub id, or the cached file.

    Raises:
        CheckpointError: it is not in the cache.
    """
    from huggingface_hub import constants
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    cache = constants.HF_HUB_CACHE
    try:
        folder = Path(container_of(model).from_hub(cache_dir=cache, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError, ValueError) as exc:
        raise InvalidModel(
            "model",
            f"must be a folder or a model in the local Hugging Face cache, got {model}, of which {cache} has no "
            "revision (refs/main and its snapshot); fetch models with `hf download`",
        ) from exc
    # Compared without resolving links: symbolic links in the cache belong to its owner.
    if not Path(os.path.normpath(folder)).is_relative_to(os.path.normpath(cache)):
        raise InvalidModel(
            "model", f"{model} must be in the Hugging Face cache, {cache}; its entry there points to {folder}"
        )
    return folder


def fetch(*models: str) -> None:
    """Fetch missing files of hub ids, with progress bars at a terminal; without a connection, cached models are used.

    For commands without anything to clean up yet: Ctrl-C ends the process at once.

    Raises:
        CheckpointError: a model can neither be fetched nor is cached.
    """
    ids = [model for model in dict.fromkeys(models) if is_hub_id(model)]
    if not ids:
        return
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    for model in ids:
        try:
            with ended_by_ctrl_c():
                container_of(model).from_hub()
        except LocalEntryNotFoundError as exc:
            try:
                cached(model)
            except InvalidModel as missing:
                raise InvalidModel("model", f"{missing.problem}; the hub cannot be reached from here") from exc
        except (HfHubHTTPError, HFValidationError, OSError) as exc:
            reason = (str(exc).strip() or repr(exc)).splitlines()[0]
            raise InvalidModel("model", f"{model} cannot be fetched: {reason}") from exc
