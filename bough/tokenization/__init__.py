"""Tokenizers and chat templates, without torch or transformers."""
