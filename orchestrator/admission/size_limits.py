"""Refuses requests by their size, as early as it is known."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from bough.errors import ContextExceeded, InvalidRequest
from bough.protocol import codec_generation
from bough.protocol.codec import MAX_NAME_LENGTH
from bough.protocol.generation import ChatPrompt, GenerateOptions, Prompt, Speculation, TextPrompt, TokenPrompt
from bough.tokenization.tokenizer import Tokenizer
from bough.trees.tree_plan import StaticShape, require_growth

# Clients recognise an overflow by its message: LangChain by the first words, litellm and aider by the words after ":".
TOO_LONG = "prompt is too long: this model's maximum context length is"


def require_texts(prompt: Prompt, options: GenerateOptions) -> None:
    """Raise InvalidRequest for names that `require_name` refuses, and for texts that are not UTF-8."""
    for field in ("request_id", "session_id", "model", "cache_salt"):
        require_name(field, getattr(options, field))
    codec_generation.require_texts(prompt, options)


def require_name(field: str, name: str) -> None:
    """Raise InvalidRequest for a name that is too long for a key of the index, or not UTF-8."""
    if len(name) > MAX_NAME_LENGTH:
        raise InvalidRequest(field, f"must have at most {MAX_NAME_LENGTH} characters", len(name))
    codec_generation.require_text(field, name)


def require_size(prompt: Prompt, tokenizer: Tokenizer, max_context: int, limit: str = "") -> None:
    """Raise ContextExceeded for a prompt that cannot fit the context with any tokens.

    It is checked before tokenizing, as that takes seconds for megabytes of text; `require_room` checks afterwards.
    `limit` says what keeps the context below the model's own limit, if anything does.
    """
    most = max_context * tokenizer.longest_token
    match prompt:
        case TextPrompt(text):
            _require_fit("text", len(text), "characters", most, max_context, limit)
        case ChatPrompt(messages, tools):
            _require_fit("chat.messages", len(messages), "messages", max_context, max_context, limit)
            calls = sum(len(call.arguments) for m in messages for call in m.tool_calls)
            size = calls + sum(len(m.content) + len(m.reasoning) for m in messages)
            _require_fit("chat.messages", size, "characters", most, max_context, limit)
            if tools is not None:
                size = sum(len(function.parameters) + len(function.description or "") for function in tools.functions)
                _require_fit("chat.tools", size, "characters", most, max_context, limit)
            for index, message in enumerate(messages):
                if len(message.role) > MAX_NAME_LENGTH:
                    raise InvalidRequest(
                        f"chat.messages[{index}].role",
                        f"must have at most {MAX_NAME_LENGTH} characters",
                        len(message.role),
                    )
        case TokenPrompt(token_ids):
            _require_fit("prompt", len(token_ids), "tokens", max_context - 1, max_context, limit)


def require_size_for_any(prompt: Prompt, tokenizers: Collection[Tokenizer], max_context: int, limit: str = "") -> None:
    """Check as `require_size` before the model is known, with the tokenizer that allows the longest text."""
    if tokenizers:
        require_size(prompt, max(tokenizers, key=lambda tokenizer: tokenizer.longest_token), max_context, limit)


def _require_fit(field: str, size: int, unit: str, most: int, max_context: int, limit: str) -> None:
    if size > most:
        raise ContextExceeded(
            field,
            f"{size} {unit}, so the {TOO_LONG} {max_context} tokens, of which at least one is for the output: "
            f"at most {most} {unit} can fit{_limited(limit)}",
        )


def require_room(tokens: Sequence[int], max_context: int, limit: str = "") -> None:
    """Raise ContextExceeded for a prompt that leaves no room for a token of output."""
    if len(tokens) >= max_context:
        raise ContextExceeded(
            "prompt",
            f"{len(tokens)} tokens, so the {TOO_LONG} {max_context} tokens, of which at least one is for the "
            f"output{_limited(limit)}",
        )


def _limited(limit: str) -> str:
    return f"; it is limited by {limit}" if limit else ""


def require_sizes(speculation: Speculation, max_nodes: int) -> None:
    """Raise InvalidRequest for trees that are impossible, or that the scheme cannot verify."""
    for name in ("budget", "width", "depth"):
        value = getattr(speculation, name)
        if value is not None and not 1 <= value <= max_nodes:
            raise InvalidRequest(f"speculation.{name}", f"must be 1 to {max_nodes}", value)
    if speculation.lookup is not None and not 0 <= speculation.lookup <= max_nodes:
        raise InvalidRequest("speculation.lookup", f"must be 0 to {max_nodes}", speculation.lookup)
    if speculation.growth is not None:
        require_growth("speculation.growth", speculation.growth, max_nodes)
    if speculation.scheme.is_sampled and not isinstance(speculation.growth, StaticShape):
        raise InvalidRequest(
            "speculation.growth",
            f"must be a shape for scheme {speculation.scheme.value}, which verifies samples",
            "best-first",
        )
