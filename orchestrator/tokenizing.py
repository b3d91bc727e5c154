"""Text to tokens and back by the tokenizer of a served model, for clients that have none."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from bough.errors import NotFound
from bough.generation import Prompt
from bough.wire import require_tokens
from orchestrator.directory import Directory, Known
from orchestrator.limits import require_size
from orchestrator.prompt import whole_prompt
from orchestrator.workers import TargetClient


class PromptRead(NamedTuple):
    """A prompt's tokens, and how many the context holds."""

    token_ids: list[int]
    max_context: int


@dataclass(frozen=True, slots=True)
class Tokenizing:
    """Speaks of models by their names; the empty one is the only model that is served."""

    directory: Directory

    async def tokens(self, prompt: Prompt, model: str) -> PromptRead:
        """A prompt as a request would read it.

        Raises:
            InvalidRequest: naming the field.
            NotFound: no such model.
            Unavailable: there is no target that serves it.
        """
        target = self._target(model)
        info = target.info
        require_size(prompt, target.tokens, info.max_context)
        # A long text takes a while, in which the streams of others go on.
        token_ids = await asyncio.to_thread(whole_prompt, prompt, target.tokens, info.vocab_size)
        return PromptRead(token_ids, info.max_context)

    def text(self, token_ids: Sequence[int], model: str) -> str:
        """What tokens stand for, special ones left out. Raises as `tokens` does."""
        target = self._target(model)
        if token_ids:
            require_tokens("tokens", token_ids, target.info.vocab_size)
        return target.tokens.decode(token_ids)

    def spell(self, model: str, token_id: int) -> bytes:
        """What one token stands for, perhaps a part of a character. Raises as `tokens` does."""
        return self._target(model).tokens.token_bytes(token_id)

    def require_model(self, model: str) -> None:
        """Raises NotFound for a model that is not served."""
        self._target(model)

    def _target(self, model: str) -> Known[TargetClient]:
        target = self.directory.target()
        if model not in ("", target.info.model_name):
            raise NotFound(f"model: value was {model[:64]!r}; must be {target.info.model_name!r}")
        return target
