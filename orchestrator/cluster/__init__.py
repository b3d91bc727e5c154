"""The workers that an orchestrator knows, and which of them it uses."""
