"""A Ray cluster over network namespaces on one machine, and the effect of disturbances on streams."""
