"""Conversations with and without session names: the regime that compares their first tokens, in a short form."""

from __future__ import annotations

from loadtest.regret.conversations import NAME, Scale, run


def test_a_sessions_name_changes_neither_tokens_nor_computed_tokens() -> None:
    """How long first tokens take is no matter of a test: `python -m loadtest.regret` measures it."""
    figures = run(Scale(num_conversations=1, num_turns=3, prompt_tokens=400, answer_tokens=12, clock_scale=50.0))
    assert figures["unequal"] == 0
    assert figures["least_cached_share"] > 0.9
    assert figures["first_nodes"]["plain"] == 1
    assert figures["unnamed_over_named"] > 0
    assert set(figures["first_token_seconds"]) == {"named", "unnamed", "plain"}


def test_it_does_not_run_if_others_are_selected() -> None:
    assert run(names=["resident"]) == {}
    assert NAME not in run(names=["resident"])
