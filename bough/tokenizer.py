"""A model's tokenizer as data that can be sent, compared and used without torch or transformers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import tokenizers

from bough.errors import InvalidRequest


@dataclass(frozen=True)
class TokenizerFiles:
    """What a worker knows of its model's tokenizer, enough to rebuild it elsewhere."""

    tokenizer_json: bytes
    chat_template: str
    eos_token_ids: tuple[int, ...]
    bos_token: str = ""
    eos_token: str = ""

    @cached_property
    def vocabulary(self) -> tuple[str, ...]:
        """Tokens in id order; ids without a token hold an empty text."""
        vocab = tokenizers.Tokenizer.from_buffer(self.tokenizer_json).get_vocab(with_added_tokens=True)
        tokens = [""] * (max(vocab.values()) + 1)
        for token, index in vocab.items():
            tokens[index] = token
        return tuple(tokens)

    @cached_property
    def fingerprint(self) -> str:
        """Hash over the vocabulary in id order: equal means that a token id means the same to both."""
        data = json.dumps(self.vocabulary, ensure_ascii=True).encode()
        return hashlib.blake2b(data, digest_size=12).hexdigest()


def first_difference(draft: Sequence[str], target: Sequence[str]) -> str | None:
    """Names the first token id that means different things to a draft and a target, or None."""
    for index, (drafted, wanted) in enumerate(zip(draft, target, strict=False)):
        if drafted != wanted:
            return f"token {index} is {drafted!r} to the draft and {wanted!r} to the target"
    if len(draft) != len(target):
        return f"the draft knows {len(draft)} tokens and the target {len(target)}"
    return None


class Tokenizer:
    """Text to tokens and back."""

    def __init__(self, files: TokenizerFiles) -> None:
        self.files = files
        self._tokenizer = tokenizers.Tokenizer.from_buffer(files.tokenizer_json)
        self._template: jinja2.Template | None = None
        self._template_problem = "this model has no chat template"
        if files.chat_template:
            try:
                self._template = _compile_template(files.chat_template)
            except jinja2.TemplateError as exc:
                self._template_problem = f"this model's chat template cannot be read: {exc}"

    @cached_property
    def longest_token(self) -> int:
        """Characters that one token stands for, at most."""
        return max(map(len, self.files.vocabulary))

    def encode(self, text: str) -> list[int]:
        """Tokens of a plain text, with the special tokens that the tokenizer adds by itself."""
        return list(self._tokenizer.encode(text).ids)

    def encode_chat(self, messages: Sequence[tuple[str, str]]) -> list[int]:
        """Tokens of a conversation of (role, content), opened for the assistant's answer."""
        if self._template is None:
            raise InvalidRequest(f"chat: {self._template_problem}; `text` or `token_ids` would do")
        try:
            text = self._template.render(
                messages=[{"role": role, "content": content} for role, content in messages],
                add_generation_prompt=True,
                bos_token=self.files.bos_token,
                eos_token=self.files.eos_token,
            )
        except (jinja2.TemplateError, TypeError) as exc:
            raise InvalidRequest(f"chat: the model's chat template refuses these messages: {exc}") from exc
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of the tokens, special tokens left out; bytes that form no character become U+FFFD."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=True)


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}`, by which some templates mark the assistant's part for training: its body stands as is."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """The nodes between the tag and its end."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _compile_template(source: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationTag]
    )

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    environment.filters["tojson"] = lambda value, **_: json.dumps(value, ensure_ascii=False)
    return environment.from_string(source)
