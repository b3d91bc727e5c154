"""One pass of all layers over a batch of trees."""
