"""Many sessions on one target: their rate, what they share, and what those leave behind that are abandoned."""
