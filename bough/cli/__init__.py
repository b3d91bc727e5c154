"""The `bough` command; its subcommands are in rooms by subject."""

import bough.rpc  # noqa: F401  # before grpc, see there
