"""bough: speculative decoding with trees from a small model, verified by a large one that streams its weights."""

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    """`bough.Client`, imported lazily, as most of bough does not need it."""
    if name == "Client":
        from bough.client import Client

        return Client
    raise AttributeError(f"module 'bough' has no attribute {name!r}")
