"""Reasoning before answers: how models mark it, the parser that finds it, and grammars of what follows it."""
