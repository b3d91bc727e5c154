"""From a prompt to a request's tokens, its output's grammar, and the special tokens that the text shows."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from typing import NamedTuple, TypeVar
from weakref import WeakValueDictionary

from bough.errors import InvalidRequest
from bough.grammar.grammar import CACHE_SALT, NUM_PROCESSES, grammar_of
from bough.protocol.codec import require_tokens
from bough.protocol.generation import (
    Channels,
    ChatPrompt,
    GenerateOptions,
    Prompt,
    Reasoning,
    TextPrompt,
    TokenPrompt,
    ToolChoice,
    Tools,
)
from bough.tokenization.chat_template import Variables, template_variables
from bough.tokenization.tokenizer import Tokenizer
from orchestrator.reasoning.formats import HARMONY_NAME, after_reasoning, shown
from orchestrator.tools.formats import format_of, has_fields, tool_prompt
from orchestrator.tools.harmony import HARMONY

Result = TypeVar("Result")

_THREADS = ThreadPoolExecutor(NUM_PROCESSES, "grammars")
_TURNS: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # by salt


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


class OutputForm(NamedTuple):
    """The grammar of an output, empty if it is free, and the special tokens that are part of its text."""

    grammar: str
    shown: Mapping[int, str]


async def output_form(
    prompt: Prompt,
    options: GenerateOptions,
    tokenizer: Tokenizer,
    tool_format: str,
    reasoning: Reasoning | None = None,
) -> OutputForm:
    """The output form that a request demands, in the configured format of tool calls, after any reasoning.

    Raises InvalidRequest naming the field whose demand cannot be met.
    """
    CACHE_SALT.set(options.cache_salt)
    tools = prompt.tools if isinstance(prompt, ChatPrompt) else None
    demanded = ""
    if (constraint := options.constraint) is not None:
        demanded = await _in_turn(options.cache_salt, lambda: grammar_of(constraint))
    form = OutputForm(demanded, {})
    is_called = tools is not None and tools.choice is not ToolChoice.NONE
    if tools is not None and is_called:
        called = tools
        form = await _in_turn(
            options.cache_salt, lambda: _of_tools(called, tokenizer, tool_format, demanded, reasoning)
        )
    if form.grammar and options.ignore_eos:
        raise InvalidRequest(
            "ignore_eos",
            "must be false with a constraint or required tool calls, whose output the model ends itself",
        )
    if form.grammar and options.min_tokens:
        raise InvalidRequest(
            "min_tokens", "must be 0 with a constraint or required tool calls, which end where nothing can follow"
        )
    if reasoning is None:
        return form
    grammar, is_whole = form.grammar, isinstance(reasoning, Channels) and is_called  # all messages, reasoning included
    if grammar and not is_whole and (options.constraint is None or options.constraint.after_reasoning):
        field = "chat.tools" if options.constraint is None else "constraint"
        grammar = after_reasoning(field, grammar, reasoning, tokenizer.added_tokens)
    return OutputForm(grammar, {**shown(reasoning, tokenizer), **form.shown})


async def _in_turn(cache_salt: str, work: Callable[[], Result]) -> Result:
    """Compile grammars in their own threads, one at a time per salt, and so per tenant.

    A tenant with slow grammars therefore leaves a thread to others. Work whose caller has gone is not started;
    started work keeps its turn, as it cannot be stopped.
    """
    turn, loop = _TURNS.setdefault(cache_salt, asyncio.Lock()), asyncio.get_running_loop()
    await turn.acquire()

    def end_turn(_: object) -> None:
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(turn.release)

    running = _THREADS.submit(copy_context().run, work)
    running.add_done_callback(end_turn)
    return await asyncio.wrap_future(running)


def _of_tools(
    tools: Tools, tokenizer: Tokenizer, tool_format: str, demanded: str, reasoning: Reasoning | None
) -> OutputForm:
    """The form of an output of tool calls; if the model may choose not to call, also the form of its answer.

    Without such a form it is free, unless names, arguments or number of calls are restricted. Raises
    InvalidRequest if the functions cannot be called so, or the parser of calls does not go with that of reasoning.
    """
    known = format_of(tool_format, tokenizer.tool_template)
    if (known is HARMONY) is not isinstance(reasoning, Channels):
        raise InvalidRequest(
            "chat.tools",
            f"must be left out, as the orchestrator's --tool-call-parser {HARMONY.name} goes with "
            f"--reasoning-parser {HARMONY_NAME} alone",
        )
    named = {i: f for i, f in enumerate(tools.functions) if not tools.allowed or f.name in tools.allowed}
    is_limited = tools.must_call or bool(tools.allowed) or not tools.allows_several
    is_free = not (is_limited or demanded or any(f.is_strict for f in named.values()))
    grammar = "" if is_free else known.grammar(named, tools, tokenizer.added_tokens, demanded)
    return OutputForm(grammar, known.shown(tokenizer.added_tokens))
