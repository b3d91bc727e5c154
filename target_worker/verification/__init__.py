"""Verdicts on trees, from the target's logits."""
