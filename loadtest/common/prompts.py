"""The prompts of different kinds that bough ships, for tests and benchmarks."""

from __future__ import annotations

import json
from pathlib import Path

PROMPTS = Path(__file__).parent.parent / "data" / "prompts.jsonl"


def load_prompts(file: Path | None = None) -> list[str]:
    """Texts of a JSONL file: its field `text`, or the first of `turns` as in MT-Bench."""
    lines = (file or PROMPTS).read_text().splitlines()
    return [entry["text"] if "text" in entry else entry["turns"][0] for entry in map(json.loads, lines)]
