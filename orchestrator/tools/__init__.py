"""Tool calls: how families of models write them, the grammars that require them, and the parser that finds them."""
