"""Keys and values of sessions in memory."""
