"""Whether processes serve: one (`python -m bough.health`), all that an orchestrator knows, a Ray cluster."""
