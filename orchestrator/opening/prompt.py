"""From a prompt to the tokens of a request."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bough.errors import InvalidRequest
from bough.protocol.codec import require_tokens
from bough.protocol.generation import ChatPrompt, Prompt, TextPrompt, TokenPrompt
from bough.tokenization.chat_template import Variables, template_variables
from bough.tokenization.tokenizer import Tokenizer
from orchestrator.tools.formats import has_fields, tool_prompt


def whole_prompt(prompt: Prompt, tokenizer: Tokenizer, vocab_size: int) -> list[int]:
    """Tokens of a prompt that begins a text. Raises InvalidRequest."""
    if isinstance(prompt, ChatPrompt) and has_fields(prompt):
        return tool_prompt(prompt, tokenizer)
    return _tokens(prompt, tokenizer.encode, tokenizer.encode_chat, vocab_size)


def next_prompt(prompt: Prompt, tokenizer: Tokenizer, vocab_size: int) -> list[int]:
    """Tokens of a prompt that continues a text. Raises InvalidRequest."""
    return _tokens(prompt, tokenizer.encode_more, tokenizer.encode_turn, vocab_size)


def continued_prompt(history: Sequence[int], prompt: Prompt, tokenizer: Tokenizer, vocab_size: int) -> list[int]:
    """A session's tokens followed by those of a prompt. Raises InvalidRequest.

    Chat templates end an answer themselves, so its end-of-sequence token is dropped if it is there.
    """
    if isinstance(prompt, ChatPrompt) and history[-1] in tokenizer.files.eos_token_ids:
        history = history[:-1]
    return [*history, *next_prompt(prompt, tokenizer, vocab_size)]


def _tokens(
    prompt: Prompt,
    encode: Callable[[str], list[int]],
    encode_messages: Callable[[list[tuple[str, str]], Variables], list[int]],
    vocab_size: int,
) -> list[int]:
    match prompt:
        case TextPrompt(text):
            tokens = encode(text)
        case ChatPrompt(messages, _, kwargs):
            if not messages:
                raise InvalidRequest("chat.messages", "must have at least one message", "none")
            turns = [(message.role, message.content) for message in messages]
            tokens = encode_messages(turns, template_variables(kwargs))
        case TokenPrompt(token_ids):
            require_tokens("token_ids.ids", token_ids, vocab_size)
            tokens = list(token_ids)
    if not tokens:
        raise InvalidRequest("prompt", "must have at least one token", "none")
    return tokens
