"""What a draft folder shares with its target: the layers that it has of it, and tensors that stay where they are.

The manifest of such a folder names the target and its fingerprint. Knows no torch and opens no checkpoints.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bough.errors import CheckpointError
from bough.model.checkpoint.atomic_files import replace

NAME = "bough_draft.json"
FORMAT = 2  # the fingerprint looks into every part of a tensor


@dataclass(frozen=True, slots=True)
class SharedWeights:
    """Of a draft that `bough pack --draft` wrote."""

    model: str  # the target's folder, or its hub id
    fingerprint: str  # of the target's contents
    kept_layers: tuple[int, ...]  # as the target counts them
    borrowed: tuple[str, ...]  # names of the tensors that are in the target's files; none where all were copied
    format: int = FORMAT

    @classmethod
    def read(cls, folder: Path) -> SharedWeights | None:
        """None for a folder that has all that it needs.

        Raises:
            CheckpointError: the manifest is damaged, or of another version.
        """
        try:
            content: dict[str, Any] = json.loads((folder / NAME).read_text())
            if content.get("format") != FORMAT:
                raise CheckpointError(f"{folder / NAME}: has format {content.get('format')}; {FORMAT} can be read")
            lists = {name: tuple(content[name]) for name in ("kept_layers", "borrowed")}
            return cls(**{**content, **lists})
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as exc:
            raise CheckpointError(f"{folder / NAME}: is damaged: {exc!r}") from exc

    def save(self, folder: Path) -> None:
        """At once or not at all."""
        replace(folder / NAME, lambda partial: partial.write_text(json.dumps(asdict(self), indent=1)))
