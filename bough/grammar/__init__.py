"""Output that follows a grammar: from a request's constraint to the tokens that may follow."""
