"""What `bough plan` and `bough up` share: where the demonstration's layers go, and what a target is expected to do."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from bough.config.cache_paths import demonstration_folder
from bough.config.reader import variable
from bough.sizing.placement import gigabytes

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


def expected(link_bytes: int, sweep_seconds: float) -> str:
    """The rate of plain decoding, by the bytes that cross the link in a sweep and the seconds of a sweep of a row."""
    streaming = f"{gigabytes(link_bytes)} of weights stream" if link_bytes else "no weights stream"
    return (
        f"expected: {streaming} in a sweep, which takes {sweep_seconds:.3g} s: {1 / sweep_seconds:.3g} tokens/s by "
        "plain decoding, more with guesses"
    )
