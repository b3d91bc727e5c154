"""A target over several machines: a ring of members, each with consecutive layers."""
