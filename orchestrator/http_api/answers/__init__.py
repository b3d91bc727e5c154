"""From events to JSON: what answers of all paths have in common."""
