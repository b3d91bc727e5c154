"""Simulated workers without weights.

`profile` describes the times of machines and network, `text_model` the true tokens and a draft's guesses, `tokenizer`
the words. Nothing here imports torch or gRPC: simulators, tests and services share it.
"""
