"""Known fields that are not supported: refused, unless their value asks for what happens anyway."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, ValidationInfo

from bough.config.json_fields import must

# By field: the accepted values.
NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "add_generation_prompt": (True,),
    "add_special_tokens": (False,),  # of a chat, whose template has them
    "background": (False,),
    "bad_words": ([],),
    "best_of": (1,),
    "context_management": ([],),
    "continue_final_message": (False,),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "length_penalty": (1,),
    "modalities": (["text"],),
    "priority": (0,),
    "prompt_logprobs": (0,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "suffix": ("",),
    "truncation": ("disabled",),
    "use_beam_search": (False,),
}


def _unsupported(value: Any, info: ValidationInfo) -> None:
    """Refuse a field that would change the answer but is not supported, unless its value is neutral."""
    _require_neutral(value, NEUTRAL.get(str(info.field_name), ()))


def _require_neutral(value: Any, neutral: tuple[object, ...]) -> None:
    if not any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in neutral):
        alternative = f", or be {' or '.join(map(json.dumps, neutral))}" if neutral else ""
        raise must(f"be left out{alternative}: it is not supported")


Unsupported = Annotated[None, BeforeValidator(_unsupported)]
OnlyTrue = Annotated[None, BeforeValidator(lambda value: _require_neutral(value, (True,)))]
