"""The target worker: streams the target's weights, keeps KV slots, verifies trees."""

import bough.model  # before torch, see there
import bough.rpc  # noqa: F401  # before grpc, see there
