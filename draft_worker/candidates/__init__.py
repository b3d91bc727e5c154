"""From a draft's logits to the tokens that may follow."""
