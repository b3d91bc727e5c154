"""The target worker: streams the target's weights, keeps KV slots, verifies trees."""

import bough.model  # noqa: F401  # before torch, see there
