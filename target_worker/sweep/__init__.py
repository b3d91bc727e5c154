"""One pass of a batch of trees through all layers."""
