"""bough beside other programs that run the same weights."""
