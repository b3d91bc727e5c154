"""The prompts that bough ships: of different kinds, for tests and benchmarks alike."""

from __future__ import annotations

import json
from pathlib import Path

PROMPTS = Path(__file__).parent.parent / "data" / "prompts.jsonl"


def load_prompts(file: Path | None = None) -> list[str]:
    """Texts of a JSONL file with a field `text` (ours) or `turns` (MT-Bench's, of which the first turn is taken)."""
    lines = (file or PROMPTS).read_text().splitlines()
    return [entry["text"] if "text" in entry else entry["turns"][0] for entry in map(json.loads, lines)]
