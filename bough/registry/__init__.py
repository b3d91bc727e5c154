"""The index in Redis or Valkey: which workers are up, and what is known of each session."""
