"""/v1/completions: from fields to requests, and from events to chunks and answers."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, aclosing, contextmanager
from http import HTTPStatus

from bough.errors import InvalidRequest
from bough.protocol.generation import Event, Finished, Prompt, PromptLogprobs, Started, TextPrompt, TokenPrompt, Tokens
from bough.tokenization.tokenizer import Tokenizer
from orchestrator.http_api.answers.answer import (
    Completion,
    Head,
    Spell,
    TokensSpelled,
    completion_logprobs,
    prompt_logprobs,
)
from orchestrator.http_api.chat import chat_prompt
from orchestrator.http_api.fields.errors import ApiError, Json, api_error, invalid
from orchestrator.http_api.fields.generation import CompletionFields, StreamOptions, TextOrTokens, TokenizeFields
from orchestrator.http_api.fields.options import RequestLimits, response_constraint, template_kwargs
from orchestrator.http_api.fields.tools import chat_tools
from orchestrator.serving.model_texts import ModelTexts

DEFAULT_MAX_TOKENS = 16  # as at OpenAI
ENTRIES_PER_TOKEN = 4  # entries in an answer's lists, without those of alternatives
MAX_ENTRIES = 1_500_000  # of all prompts' tokens in one answer; they take some 100 MB, and 100 MB more when encoded

# Names of gRPC fields in this API, for error messages.
FIELD_NAMES = {"text": "prompt", "token_ids.ids": "prompt", "token_ids": "prompt", "prompt_logprobs": "echo"}


def text_prompt(prompt: TextOrTokens) -> TextPrompt | TokenPrompt:
    """One prompt of the request."""
    return TextPrompt(prompt) if isinstance(prompt, str) else TokenPrompt(prompt)


def place_names(index: int, num_prompts: int) -> dict[str, str]:
    """Names of a prompt's fields for error messages; with several prompts they include its index."""
    place = "prompt" if num_prompts == 1 else f"prompt[{index}]"
    return dict.fromkeys(("prompt", "tokens", "text", "token_ids.ids", "token_ids"), place)


async def echoes(prompts: Sequence[TextPrompt | TokenPrompt], texts: ModelTexts, model: str) -> list[str]:
    """The prompts as texts, which the answers echo. Raises ApiError naming the invalid one."""
    echoes = []
    for index, prompt in enumerate(prompts):
        if isinstance(prompt, TextPrompt):
            echoes.append(prompt.text)
            continue
        try:
            echoes.append(await texts.text(prompt.token_ids, model, Tokenizer.decode_prompt))
        except InvalidRequest as exc:
            raise api_error(exc, place_names(index, len(prompts))) from exc
    return echoes


@contextmanager
def with_places(
    opened: AbstractContextManager[Sequence[AsyncGenerator[Event]]], names: Mapping[str, str], num_prompts: int
) -> Iterator[list[AsyncGenerator[Event]]]:
    """Streams of this number for each prompt; their errors name the prompt."""
    with opened as streams:
        yield [
            _named(stream, {**names, **place_names(index * num_prompts // len(streams), num_prompts)})
            for index, stream in enumerate(streams)
        ]


async def _named(stream: AsyncGenerator[Event], names: Mapping[str, str]) -> AsyncGenerator[Event]:
    async with aclosing(stream):
        try:
            async for event in stream:
                yield event
        except InvalidRequest as exc:
            raise api_error(exc, names) from exc


def tokenized_prompt(fields: TokenizeFields) -> Prompt:
    """The text or conversation to tokenize. Raises ApiError naming the invalid field."""
    if (fields.prompt is None) == (fields.messages is None):
        raise invalid("prompt", fields.prompt, "be given, or messages, and not both")
    adds = fields.messages is None  # as for prompts: a chat's template has all special tokens
    if fields.add_special_tokens is not None and fields.add_special_tokens is not adds:
        must = f"be left out, or be {str(adds).lower()}, as for prompts"
        raise invalid("add_special_tokens", fields.add_special_tokens, must)
    if fields.messages is None:
        if fields.tools:
            raise invalid("tools", [tool.function.name for tool in fields.tools], "be left out with prompt")
        if fields.chat_template_kwargs:
            raise invalid("chat_template_kwargs", fields.chat_template_kwargs, "be left out with prompt")
        return TextPrompt(fields.prompt or "")
    variables = template_kwargs(fields.chat_template_kwargs, None)
    return chat_prompt(fields.messages, chat_tools(fields.tools), variables)


def completion_limits(fields: CompletionFields) -> RequestLimits:
    """Limits of the request. Raises ApiError naming the invalid field."""
    of_prompt = fields.logprobs if fields.echo else None
    if fields.max_tokens == 0 and of_prompt is None:
        raise invalid("max_tokens", 0, "be 1 or more, except with echo and logprobs")
    most = DEFAULT_MAX_TOKENS if fields.max_tokens is None else fields.max_tokens
    return RequestLimits(most, fields.logprobs, of_prompt, fields.n, response_constraint(fields))


class CompletionAnswer(Completion):
    """An answer to one or several prompts."""

    whole_object = chunk_object = "text_completion"

    def __init__(
        self,
        head: Head,
        echoes: Sequence[str],
        choices_per_prompt: int,
        stream_options: StreamOptions,
        spell: Spell | None,
        prompt_logprobs: int | None = None,
    ) -> None:
        """`echoes` are the texts at the beginning of each prompt's choices; the first has the prompt's scores."""
        super().__init__(head, len(echoes) * choices_per_prompt, choices_per_prompt, stream_options, spell)
        self._echoes = [echo for echo in echoes for _ in range(choices_per_prompt)]
        self._logprobs = [TokensSpelled([], [], [], []) for _ in self.choices]
        self._prompt_logprobs, self._num_scored = prompt_logprobs, 0
        self._texts: list[list[str]] = [[] for _ in self.choices]

    def _entries(self, index: int, event: Event) -> Iterator[Json]:
        match event:
            case Started():
                self._count(index, event.prompt_tokens)
                if echo := self._echoes[index]:
                    self._texts[index].append(echo)
                    yield _entry(index, echo)
            case PromptLogprobs() if self._token_bytes is not None:
                spelled = prompt_logprobs(event, self._token_bytes)
                for each in range(index, index + self._choices_per_prompt):
                    yield _entry(each, "", self._noted(each, spelled))
            case Tokens():
                self._texts[index].append(event.text)
                logprobs = self._spelled(index, event)
                if event.text or logprobs or self.stream_options.continuous_usage_stats:
                    yield _entry(index, event.text, logprobs)
            case Finished():
                self._texts[index].append(event.text)
                yield _entry(index, event.text) | self._ending(index)

    def _count(self, index: int, prompt_tokens: int) -> None:
        """Count the entries of a prompt's tokens for all choices, at the first one. Raises ApiError for too many."""
        if self._prompt_logprobs is None or index % self._choices_per_prompt:
            return
        self._num_scored += self._choices_per_prompt * prompt_tokens * (self._prompt_logprobs + ENTRIES_PER_TOKEN)
        if self._num_scored > MAX_ENTRIES:
            size = f"n x tokens of the prompts x (logprobs + {ENTRIES_PER_TOKEN})"
            message = f"echo: {size} must be at most {MAX_ENTRIES}, got {self._num_scored} or more"
            raise ApiError(HTTPStatus.BAD_REQUEST, message, param="echo")

    def _choice(self, index: int) -> Json:
        logprobs = None if self._token_bytes is None else self._logprobs[index]
        return _entry(index, "".join(self._texts[index]), logprobs) | self._ending(index)

    def _spelled(self, index: int, event: Tokens) -> TokensSpelled | None:
        if self._token_bytes is None or not event.logprobs:
            return None
        begins = [begin + len(self._echoes[index]) for begin in event.begins]
        return self._noted(index, completion_logprobs(event.logprobs, begins, self._token_bytes))

    def _noted(self, index: int, spelled: TokensSpelled) -> TokensSpelled:
        """Entries of a choice; stored if they are sent at the end."""
        if not self.head.is_stream:
            self._logprobs[index].extend(spelled)
        return spelled


def _entry(index: int, text: str, logprobs: TokensSpelled | None = None) -> Json:
    entries = None if logprobs is None else logprobs._asdict()
    return {"index": index, "text": text, "logprobs": entries, "finish_reason": None}
