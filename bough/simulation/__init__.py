"""Workers without weights, as numbers: how long they take, what their drafts guess, and which text they would say.

`profile` describes machines, models and a network; `law` says which token is true and what a draft guesses;
`tokenizer` makes words of tokens. Nothing here imports torch or gRPC, so that simulators, tests and services share it.
"""
