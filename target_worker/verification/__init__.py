"""What a target makes of a tree, from its logits."""
