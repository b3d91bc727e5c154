"""KV slots: which session owns which rows, and where they are."""
