"""gRPC as all services of bough use it: servers, channels, statuses, graceful shutdown."""

import os

# gRPC's C code logs to standard error in its own format; since version 1.65 it does so for every failed handshake of
# a stranger. ERROR keeps only errors. gRPC reads the variable when it is imported, so services import this first.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
