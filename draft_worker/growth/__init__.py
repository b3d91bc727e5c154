"""How trees grow: which nodes are expanded next."""
