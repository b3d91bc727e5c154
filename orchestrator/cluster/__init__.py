"""The workers that an orchestrator knows, and its choice among them."""
