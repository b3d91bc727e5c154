"""Growing trees: which nodes are expanded next."""
