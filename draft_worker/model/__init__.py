"""Draft models: loading, warming up and running."""
