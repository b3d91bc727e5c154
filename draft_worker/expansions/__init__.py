"""What a draft has found out below a session's committed tokens already."""
