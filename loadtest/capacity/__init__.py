"""Compares the predictions of `bough simulate` with measurements."""
