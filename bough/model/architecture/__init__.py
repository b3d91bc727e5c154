"""Builds transformers' models without weights, with bough's attention and experts in them."""
