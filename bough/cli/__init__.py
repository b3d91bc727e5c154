"""The `bough` command, with a file for each subcommand."""

import bough.rpc  # noqa: F401  # before grpc, see there
