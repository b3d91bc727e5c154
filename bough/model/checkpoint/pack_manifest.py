"""The manifest of `bough pack`: complete shards, and the checksum of every tensor. Uses no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bough.errors import CheckpointError

MANIFEST_NAME = "bough_pack.json"


def read_checksums(folder: Path) -> dict[str, int]:
    """The crc32 by tensor name of a checkpoint that `bough pack` wrote; empty for others."""
    manifest = folder / MANIFEST_NAME
    return dict(read_manifest(manifest)["checksums"]) if manifest.is_file() else {}


def read_manifest(manifest: Path) -> dict[str, Any]:
    """Read a manifest. Raises CheckpointError if it is damaged."""
    try:
        content = dict(json.loads(manifest.read_text()))
        return {**content, **{name: dict(content[name]) for name in ("shards", "checksums", "weight_map")}}
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise CheckpointError(f"{manifest}: is damaged: {exc!r}; run `bough pack` into another folder") from exc
