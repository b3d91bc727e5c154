"""What a GPU runs: whether it is exact, within its memory, and as fast as the link."""
