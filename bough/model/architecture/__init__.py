"""Models of transformers built without weights, and what bough puts in the place of their attention and experts."""
