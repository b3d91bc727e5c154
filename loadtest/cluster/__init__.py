"""Several machines on one: a Ray cluster over network namespaces, and what happens to streams when it is disturbed."""
