"""gRPC as all services of bough use it: servers, channels, statuses, graceful shutdown."""

import os

# gRPC's C code writes to standard error in a form of its own, since version 1.65 also for every failed handshake of a
# stranger. Errors are still told. Read when grpc is imported, so it is set here, and services import this first.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
