"""What decides a draft: a training run that was interrupted is gone on with only where all of it is the same."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from bough.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a student is trained, and on what. Where something is None it is not known yet, and not compared."""

    target: str  # fingerprint
    dtype: str
    text_tokens: int
    text_rows: int
    row_tokens: int
    rank: int
    learning_rate: float
    batch_rows: int
    tokens: int  # to train on, some of them more than once
    seed: int
    dropped_layers: tuple[int, ...] | None = None
    text: str | None = None  # fingerprint of the rows to train on

    def require_same(self, file: Path) -> None:
        """Makes sure that a checkpoint, if there is one, is of this recipe.

        Raises:
            ConfigError: naming the setting, or the checkpoint is damaged.
        """
        if not file.is_file():
            return
        try:
            with safe_open(file, "pt") as held:
                then: dict[str, Any] = dict(json.loads(held.metadata()["recipe"]))
        except (SafetensorError, KeyError, ValueError, TypeError) as exc:
            raise ConfigError(f"--out: {file} is damaged: {exc}; without it the run begins anew") from exc
        for name, value in json.loads(json.dumps(asdict(self))).items():
            if value is not None and then.get(name) != value:
                was = _words(name, then[name]) if name in then else "nothing on record"
                raise ConfigError(
                    f"{_setting(name)}: {_words(name, value)}; {file} is a training run that began with {was}; "
                    f"the same {_setting(name)}, or another --out, would do"
                )


def _setting(field: str) -> str:
    """Where a field comes from."""
    other = {"target": "TARGET", "dropped_layers": "--drop-layers", "text": "--data"}
    return other.get(field, "--" + field.replace("_", "-"))


def _words(field: str, value: Any) -> str:
    if field in ("target", "text"):
        return f"fingerprint {value}"
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
