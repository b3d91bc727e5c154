"""From a draft's logits to candidates for the next token."""
