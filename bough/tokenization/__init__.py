"""Tokenizers and chat templates of models, without torch or transformers."""
