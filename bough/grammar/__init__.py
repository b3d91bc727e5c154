"""Output that follows a grammar: from what a request demands to the tokens that may follow."""
