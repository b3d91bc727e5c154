"""The draft worker: grows trees of guesses with a small model."""

import bough.model  # noqa: F401  # before torch, see there
