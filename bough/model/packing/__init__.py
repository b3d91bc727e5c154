"""`bough pack`: writes smaller checkpoints and drafts, shard by shard."""
