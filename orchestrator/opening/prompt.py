"""From a prompt to the tokens that a request stands on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bough.errors import InvalidRequest
from bough.protocol.codec import require_tokens
from bough.protocol.generation import ChatPrompt, Prompt, TextPrompt, TokenPrompt
from bough.tokenization.tokenizer import Tokenizer


def whole_prompt(prompt: Prompt, tokenizer: Tokenizer, vocab_size: int) -> list[int]:
    """Tokens of a prompt that is all there is. Raises InvalidRequest."""
    return _tokens(prompt, tokenizer.encode, tokenizer.encode_chat, vocab_size)


def next_prompt(prompt: Prompt, tokenizer: Tokenizer, vocab_size: int) -> list[int]:
    """Tokens of a prompt that comes after something. Raises InvalidRequest."""
    return _tokens(prompt, tokenizer.encode_more, tokenizer.encode_turn, vocab_size)


def continued_prompt(history: Sequence[int], prompt: Prompt, tokenizer: Tokenizer, vocab_size: int) -> list[int]:
    """Tokens of a prompt that comes after what a session holds, with these.

    A chat's template has its own way to end an answer, whether the model has ended it or was cut off. Raises
    InvalidRequest.
    """
    if isinstance(prompt, ChatPrompt) and history[-1] in tokenizer.files.eos_token_ids:
        history = history[:-1]
    return [*history, *next_prompt(prompt, tokenizer, vocab_size)]


def _tokens(
    prompt: Prompt,
    encode: Callable[[str], list[int]],
    encode_messages: Callable[[list[tuple[str, str]]], list[int]],
    vocab_size: int,
) -> list[int]:
    match prompt:
        case TextPrompt(text):
            tokens = encode(text)
        case ChatPrompt(messages):
            if not messages:
                raise InvalidRequest("chat.messages: empty; at least one message would do")
            tokens = encode_messages([(message.role, message.content) for message in messages])
        case TokenPrompt(token_ids):
            require_tokens("token_ids.ids", token_ids, vocab_size)
            tokens = list(token_ids)
    if not tokens:
        raise InvalidRequest("prompt: empty; at least one token would do")
    return tokens
