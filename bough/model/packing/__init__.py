"""`bough pack`: smaller checkpoints and drafts, written shard by shard."""
