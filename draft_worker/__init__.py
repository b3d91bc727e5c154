"""The draft worker: grows trees of guesses with a small model."""

import bough.model  # before torch, see there
import bough.rpc  # noqa: F401  # before grpc, see there
