"""Tokenizers of families that call tools, and what their outputs may be."""

from __future__ import annotations

from typing import NamedTuple

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as HFTokenizer

from bough.grammar.allowed_tokens import Grammars
from bough.protocol.generation import ChatPrompt, GenerateOptions, Message, Tools
from bough.tokenization.tokenizer import Tokenizer
from bough.tokenization.vocabulary import TokenizerFiles
from orchestrator.opening.prompt import output_form
from tests.fakes.tool_templates import SPECIAL, TEMPLATES, TOKENS

QUESTION = (Message("user", "Weather?"),)


def tokenizer_with(template: str, tokens: list[str], is_special: bool = True) -> TokenizerFiles:
    """Of bytes, with an end and other tokens of whole texts."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = HFTokenizer(models.BPE(vocab={character: index for index, character in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens(["</s>", "<think>"])
    tokenizer.add_tokens([AddedToken(token, special=is_special, normalized=False) for token in tokens])
    return TokenizerFiles(tokenizer.to_str().encode(), template, (256,), "", "</s>")


class Model(NamedTuple):
    """A tokenizer whose template has a format."""

    files: TokenizerFiles
    tokens: Tokenizer

    async def form(self, tools: Tools, **options: object) -> tuple[str, dict[int, str]]:
        prompt = ChatPrompt(QUESTION, tools)
        grammar, shown = await output_form(prompt, GenerateOptions(**options), self.tokens, "auto")
        return grammar, dict(shown)

    def allows(self, grammar: str, text: str) -> bool:
        """Whether a text may be a whole output."""
        allowed = Grammars(self.files, 270).along(grammar, None)
        assert allowed is not None
        mask = allowed.after(self.tokens.encode_more(text))
        return mask is not None and bool(mask[256])


def model_of(name: str, *, has_tokens: bool = True) -> Model:
    files = tokenizer_with(TEMPLATES[name], TOKENS[name] if has_tokens else [], is_special=name in SPECIAL)
    return Model(files, Tokenizer(files))
