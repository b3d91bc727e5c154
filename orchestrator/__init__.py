"""The orchestrator: sessions, planning, rounds, and the front doors. Imports no torch."""
