"""One request on its way: its tokens, its text, its deadline."""
