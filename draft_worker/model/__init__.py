"""Draft models: loaded, warmed up, and called."""
