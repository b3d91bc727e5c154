"""gRPC as used by all services: servers, channels, statuses and graceful shutdown."""
