"""gRPC as all services of bough use it: servers, channels, statuses, graceful shutdown."""
