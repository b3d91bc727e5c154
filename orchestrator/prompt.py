"""From a prompt to the tokens that a request stands on."""

from __future__ import annotations

from collections.abc import Sequence

from bough.errors import InvalidRequest
from bough.generation import ChatPrompt, Prompt, TextPrompt, TokenPrompt
from bough.tokenizer import Tokenizer
from bough.wire import require_tokens


def whole_prompt(prompt: Prompt, tokenizer: Tokenizer, vocab_size: int) -> list[int]:
    """Tokens of a prompt that is all there is. Raises InvalidRequest."""
    match prompt:
        case TextPrompt(text):
            tokens = tokenizer.encode(text)
        case ChatPrompt():
            tokens = tokenizer.encode_chat(_messages(prompt))
        case TokenPrompt(token_ids):
            require_tokens("token_ids.ids", token_ids, vocab_size)
            tokens = list(token_ids)
    return _required(tokens)


def next_prompt(prompt: Prompt, tokenizer: Tokenizer, vocab_size: int) -> list[int]:
    """Tokens of a prompt that comes after something. Raises InvalidRequest."""
    match prompt:
        case TextPrompt(text):
            tokens = tokenizer.encode_more(text)
        case ChatPrompt():
            tokens = tokenizer.encode_turn(_messages(prompt))
        case TokenPrompt(token_ids):
            require_tokens("token_ids.ids", token_ids, vocab_size)
            tokens = list(token_ids)
    return _required(tokens)


def continued_prompt(history: Sequence[int], prompt: Prompt, tokenizer: Tokenizer, vocab_size: int) -> list[int]:
    """Tokens of a prompt that comes after what a session holds, with these.

    A chat's template has its own way to end an answer, whether the model has ended it or was cut off. Raises
    InvalidRequest.
    """
    if isinstance(prompt, ChatPrompt) and history[-1] in tokenizer.files.eos_token_ids:
        history = history[:-1]
    return [*history, *next_prompt(prompt, tokenizer, vocab_size)]


def _messages(prompt: ChatPrompt) -> list[tuple[str, str]]:
    if not prompt.messages:
        raise InvalidRequest("chat.messages: empty; at least one message would do")
    return [(message.role, message.content) for message in prompt.messages]


def _required(tokens: list[int]) -> list[int]:
    if not tokens:
        raise InvalidRequest("prompt: empty; at least one token would do")
    return tokens
