"""Metrics and traces of an orchestrator."""
