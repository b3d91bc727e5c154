"""Writes docs/benchmarks.md from the JSON files in docs/benchmarks/.

python -m loadtest.tables
"""

from __future__ import annotations

from pathlib import Path

from loadtest.tables.markdown import markdown
from loadtest.tables.runs import read_subjects

DOCS = Path(__file__).parents[2] / "docs"


def main() -> None:
    """Write the page and print its path."""
    page = DOCS / "benchmarks.md"
    try:
        page.write_text(markdown(read_subjects(DOCS / "benchmarks")))
    except ValueError as exc:
        raise SystemExit(f"error: {exc}") from exc
    print(f"{page}: written")


if __name__ == "__main__":
    main()
