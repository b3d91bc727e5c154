"""The orchestrator: sessions, planning, rounds, and the front doors. Imports no torch."""

import bough.rpc  # noqa: F401  # before grpc, see there
