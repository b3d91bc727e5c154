"""The index in Redis or Valkey: live workers, and records of sessions, requests and cached prefixes."""
