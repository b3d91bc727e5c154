"""The orchestrator: sessions, planning, rounds, the front door. Imports no torch."""
