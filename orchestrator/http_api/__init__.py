"""The OpenAI-compatible HTTP front door: the same requests as over gRPC, in another spelling."""
