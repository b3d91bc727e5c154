"""The orchestrator: sessions, planning, rounds, and the APIs. Imports no torch."""

import bough.rpc  # noqa: F401  # before grpc, see there
