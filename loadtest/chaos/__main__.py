"""`python -m loadtest.chaos`, as `loadtest.chaos.faults` describes it."""

from __future__ import annotations

from loadtest.chaos.faults import main

if __name__ == "__main__":
    raise SystemExit(main())
