"""A prompt that is too long: who can change that, and how."""

from __future__ import annotations

from pathlib import Path

import pytest

from bough.errors import ContextExceeded
from bough.model.checkpoint.model_places import load_tokenizer_files
from bough.protocol.generation import TokenPrompt
from bough.tokenization.tokenizer import Tokenizer
from orchestrator.admission.size_limits import require_room, require_size_for_any

LIMIT = "--max-context of the target; the model's own limit is 8192"


def test_a_limit_that_is_not_the_models_own_is_named(tiny: Path) -> None:
    """An agent with a first request of 3,000 tokens could not be helped: nothing said what the 2,048 came from."""
    words = f"this model's maximum context length is 8 tokens, .*; it is limited by {LIMIT}$"
    with pytest.raises(ContextExceeded, match=words):
        require_room([1] * 9, 8, LIMIT)
    with pytest.raises(ContextExceeded, match=words):
        require_size_for_any(TokenPrompt((1,) * 9), [Tokenizer(load_tokenizer_files(tiny))], 8, LIMIT)


def test_the_models_own_limit_needs_no_more_words() -> None:
    with pytest.raises(ContextExceeded, match=r"for the output$"):
        require_room([1] * 9, 8)
