"""The orchestrator: sessions, planning, rounds, the front door. Imports no torch."""

import bough.rpc  # noqa: F401  # before grpc, see there
