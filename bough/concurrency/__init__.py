"""Helpers for asyncio tasks and futures."""
