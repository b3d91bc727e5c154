"""Calls of tools: how families of models spell them, the grammars that demand them, and the parser that finds them."""
