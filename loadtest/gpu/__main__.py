"""`python -m loadtest.gpu`, as `loadtest.gpu.check` describes it."""

from __future__ import annotations

from loadtest.gpu.check import main

if __name__ == "__main__":
    main()
