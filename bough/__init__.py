"""bough: trees of guesses from a small model, verified by a large one that streams through the accelerator."""

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    """`bough.Client`, imported when wanted: most of bough has no use for it."""
    if name == "Client":
        from bough.client import Client

        return Client
    raise AttributeError(f"module 'bough' has no attribute {name!r}")
