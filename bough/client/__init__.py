"""A client for applications: `from bough.client import Client`."""

from bough.client.client import Client

__all__ = ["Client"]
