"""Where `bough plan` and `bough up` place the layers of the demonstration."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from bough.config.cache_paths import demonstration_folder
from bough.config.reader import variable

STREAMED = (
    "the demonstration model would fit in memory, and streams from disk so that it costs what a large model does; "
    f"{variable('target_worker', 'resident_layers')}=-1 leaves it in memory"
)


def is_demonstration(model: str) -> bool:
    """Whether a model is the demonstration's folder."""
    return Path(model).expanduser().absolute() == demonstration_folder().absolute()


def placement_flags(model: str, environ: Mapping[str, str]) -> list[str]:
    """Flags of a target for a model, unless the environment sets them: the demonstration streams."""
    is_set = variable("target_worker", "resident_layers") in environ
    return ["--resident-layers", "0"] if is_demonstration(model) and not is_set else []
