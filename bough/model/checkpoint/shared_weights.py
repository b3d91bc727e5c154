"""What a draft folder shares with its target: its choice of layers, and tensors that stay in the target's files.

The folder's manifest names the target and its fingerprint. This module uses no torch and opens no checkpoints.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bough.errors import CheckpointError
from bough.model.checkpoint.atomic_files import replace

NAME = "bough_draft.json"
FORMAT = 2  # 2: the fingerprint samples every part of a tensor


@dataclass(frozen=True, slots=True)
class SharedWeights:
    """Manifest of a draft that `bough pack --draft` wrote."""

    model: str  # the target's folder, or its hub id
    fingerprint: str  # of the target's contents
    kept_layers: tuple[int, ...]  # in the target's numbering
    borrowed: tuple[str, ...]  # names of tensors in the target's files; empty if all were copied
    format: int = FORMAT

    @classmethod
    def read(cls, folder: Path) -> SharedWeights | None:
        """Read a folder's manifest; None for a folder that shares nothing.

        Raises:
            CheckpointError: the manifest is damaged, or of another version.
        """
        try:
            content: dict[str, Any] = json.loads((folder / NAME).read_text())
            if content.get("format") != FORMAT:
                raise CheckpointError(f"{folder / NAME}: format must be {FORMAT}, got {content.get('format')}")
            lists = {name: tuple(content[name]) for name in ("kept_layers", "borrowed")}
            return cls(**{**content, **lists})
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as exc:
            raise CheckpointError(f"{folder / NAME}: is damaged: {exc!r}") from exc

    def save(self, folder: Path) -> None:
        """Write the manifest atomically."""
        replace(folder / NAME, lambda partial: partial.write_text(json.dumps(asdict(self), indent=1)))
