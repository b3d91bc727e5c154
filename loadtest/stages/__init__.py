"""Tries what could carry hidden states between the stages of a target."""
