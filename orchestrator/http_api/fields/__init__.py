"""From JSON to requests: the fields of all paths that generate, and errors that name fields."""
