"""The expansion cache: the draft's results below a session's committed tokens."""
