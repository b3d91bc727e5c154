"""The target worker: streams the target's weights, keeps KV slots, verifies trees."""
