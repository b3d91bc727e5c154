"""Whether what `bough simulate` predicts is what was measured."""
