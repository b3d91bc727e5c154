"""Thoughts before answers: how models mark them, the parser that finds them, and grammars of what follows them."""
