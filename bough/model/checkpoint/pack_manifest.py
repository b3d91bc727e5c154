"""What `bough pack` writes beside its tensors: which shards are whole, and the checksum of every tensor. No torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bough.errors import CheckpointError

MANIFEST_NAME = "bough_pack.json"


def read_checksums(folder: Path) -> dict[str, int]:
    """crc32 by tensor name, where `bough pack` wrote the checkpoint; nothing for any other."""
    manifest = folder / MANIFEST_NAME
    return dict(read_manifest(manifest)["checksums"]) if manifest.is_file() else {}


def read_manifest(manifest: Path) -> dict[str, Any]:
    """Raises CheckpointError where it is damaged."""
    try:
        content = dict(json.loads(manifest.read_text()))
        return {**content, **{name: dict(content[name]) for name in ("shards", "checksums", "weight_map")}}
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise CheckpointError(f"{manifest}: is damaged: {exc!r}; `bough pack` into another folder would do") from exc
