"""From events to JSON: the common parts of all answers."""
