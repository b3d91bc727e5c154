"""Exits with what `bough.health.probe` finds."""

import sys

from bough.health.probe import main

sys.exit(main())
