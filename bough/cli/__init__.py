"""The `bough` command; its subcommands are in packages by subject."""

import bough.rpc  # noqa: F401  # before grpc, see there
