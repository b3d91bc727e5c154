"""What the protocol's whole numbers and texts cannot carry, by name: protobuf says neither which field nor what would
do."""

from __future__ import annotations

from bough.errors import InvalidRequest
from bough.protocol.generation import ChatPrompt, GenerateOptions, Prompt, TextPrompt, TokenPrompt
from bough.protocol.sampling_params import MAX_SEED
from bough.trees.tree_plan import require_growth

MAX_UINT32 = 2**32 - 1


def require_numbers(prompt: Prompt, options: GenerateOptions) -> None:
    """Raises InvalidRequest; what is carried is for the orchestrator to judge."""
    tokens = prompt.token_ids if isinstance(prompt, TokenPrompt) else ()
    speculation = options.speculation
    numbers = (
        *((name, getattr(options, name), MAX_UINT32) for name in ("top_k", "max_tokens", "logprobs")),
        ("seed", options.seed, MAX_SEED),
        *((f"stop_token_ids[{i}]", token, MAX_UINT32) for i, token in enumerate(options.stop_token_ids)),
        *((f"logit_bias[{token}]", token, MAX_UINT32) for token in options.logit_bias),
        *((f"speculation.{n}", getattr(speculation, n), MAX_UINT32) for n in ("budget", "width", "depth", "lookup")),
        *((f"token_ids[{i}]", token, MAX_UINT32) for i, token in enumerate(tokens)),
    )
    for name, value, most in numbers:
        if value is not None and not 0 <= value <= most:
            raise InvalidRequest(f"{name}: {value}; 0 to {most} would do")
    if speculation.growth is not None:
        require_growth("speculation.growth", speculation.growth, MAX_UINT32)


def require_texts(prompt: Prompt, options: GenerateOptions) -> None:
    """Raises InvalidRequest: Python gives bytes that are not UTF-8 a place in a text, from which none can be sent."""
    texts = [(name, getattr(options, name)) for name in ("request_id", "session_id", "model", "cache_salt")]
    texts += [(f"stop[{i}]", stop) for i, stop in enumerate(options.stop)]
    match prompt:
        case TextPrompt(text):
            texts.append(("text", text))
        case ChatPrompt(messages):
            for i, message in enumerate(messages):
                texts += [(f"messages[{i}].role", message.role), (f"messages[{i}].content", message.content)]
    for name, text in texts:
        require_text(name, text)


def require_text(name: str, text: str) -> None:
    """Raises InvalidRequest for one text that cannot be sent, by the name of its field."""
    try:
        text.encode()
    except UnicodeEncodeError as exc:
        raise InvalidRequest(
            f"{name}: {text[exc.start : exc.start + 16]!r} at character {exc.start} is not UTF-8; text in UTF-8 "
            "would do"
        ) from exc
