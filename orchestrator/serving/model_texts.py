"""Tokenizes and detokenizes with a served model's tokenizer, for clients that have none."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from bough.config.processes import OrchestratorConfig
from bough.protocol.codec import require_tokens
from bough.protocol.generation import GenerateOptions, Prompt
from bough.tokenization.tokenizer import Tokenizer
from orchestrator.admission.size_limits import require_size
from orchestrator.cluster.served_models import TargetWaiting, targets_for
from orchestrator.cluster.worker_handle import TargetHandle
from orchestrator.opening.prompt import whole_prompt
from orchestrator.sessions.session import Deadline
from orchestrator.tools.formats import format_of
from orchestrator.tools.tool_format import ToolFormat

MOST_HELD = 32  # calls that wait for a target; they have no places, and their texts are in memory


class PromptRead(NamedTuple):
    """A prompt's tokens, and the tokenizer and context length of its model."""

    token_ids: list[int]
    tokenizer: Tokenizer
    max_context: int

    def token_strs(self) -> list[str]:
        """The text of each token, with U+FFFD for parts of characters. Of long prompts it takes a while."""
        return [self.tokenizer.token_bytes(token).decode(errors="replace") for token in self.token_ids]


@dataclass(slots=True)
class ModelTexts:
    """Tokenizes for models by name; the empty name means the only served model.

    While a recently used target is away, calls wait for it as new requests do. A prompt of token ids that the API
    echoes as text waits here before its request is admitted; the request's own waits are counted separately.
    """

    waiting: TargetWaiting
    config: OrchestratorConfig
    _turn: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(1))  # one thread is left to requests

    async def tokens(self, prompt: Prompt, model: str) -> PromptRead:
        """Tokenize a prompt as a request would. Raises InvalidRequest, NotFound of the model, or Unavailable."""
        target = await self._awaited(model)
        info = target.info
        require_size(prompt, target.tokenizer, info.max_context, info.context_limit)
        async with self._turn:
            token_ids = await self.waiting.directory.tokenizing.run(
                lambda: whole_prompt(prompt, target.tokenizer, info.vocab_size)
            )
        return PromptRead(token_ids, target.tokenizer, info.max_context)

    async def text(
        self, token_ids: Sequence[int], model: str, decode: Callable[[Tokenizer, Sequence[int]], str] = Tokenizer.decode
    ) -> str:
        """The text of tokens, by default without special ones. Raises as `tokens` does."""
        target = await self._awaited(model)

        def decoded() -> str:
            require_tokens("tokens", token_ids, target.info.vocab_size)
            return decode(target.tokenizer, token_ids)

        async with self._turn:
            return await self.waiting.directory.tokenizing.run(decoded)

    def tokenizer(self, model: str) -> Tokenizer:
        """A model's tokenizer, even while no target with it is usable. Raises as `tokens` does, at once."""
        for target in self.waiting.directory.targets:
            if target.info.model_name == model:
                return target.tokenizer
        return self._target(model).tokenizer

    def tool_format(self, model: str) -> ToolFormat:
        """A model's format of tool calls. Raises as `tokens` does."""
        return format_of(self.config.tool_call_parser, self.tokenizer(model).tool_template)

    async def _awaited(self, model: str) -> TargetHandle:
        async def look() -> TargetHandle:
            return self._target(model)

        return await self.waiting.once_there(look, Deadline(queue_seconds=self.config.queue_timeout))

    def _target(self, model: str) -> TargetHandle:
        return targets_for(self.waiting.directory, GenerateOptions(model=model), None, None)[0]
