"""A byte-level tokenizer with 512 words for simulated models, built in memory; it can encode any text."""

from __future__ import annotations

import itertools
from functools import cache

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from bough.simulation.text_model import NUM_BYTES
from bough.tokenization.vocabulary import TokenizerFiles

SYLLABLES = ("ka", "lo", "mi", "ne", "ru", "sa", "to", "vi")
BEGIN_TOKEN, END_TOKEN = NUM_BYTES, NUM_BYTES + 1
_ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
_BLANK = "Ġ"  # a space in byte-level notation
# Tool calls have Hermes' format, as they are generated.
CHAT_TEMPLATE = (
    "{% for t in tools or [] %}{% if loop.first %}tools:\n{% endif %}{{ t.function | tojson }}\n{% endfor %}"
    "{% for m in messages %}{{ m['role'] }}:{% if m.content or not m.tool_calls %} {{ m['content'] }}{% endif %}"
    '{% for call in m.tool_calls or [] %}{% if m.content or not loop.first %}{{ "\n" }}{% endif %}'
    '{{ \'<tool_call>\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{ call.function.arguments | tojson }}{{ '}\n</tool_call>' }}{% endfor %}"
    "{{ eos_token }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


def byte_token(character: str) -> int:
    """The token of an ASCII character."""
    ((spelling, _),) = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(character)
    return _ALPHABET.index(spelling)


@cache
def simulated_tokenizer() -> TokenizerFiles:
    """The tokenizer's files, the same in every process: simulated drafts and targets match."""
    begin, end = "<|begin|>", "<|end|>"
    words = ["".join((_BLANK, *parts)) for parts in itertools.product(SYLLABLES, repeat=3)]
    beginnings = {word[:length]: None for word in words for length in range(2, len(word))}
    tokens = [*_ALPHABET, begin, end, *words, *beginnings]
    merges = {(word[: length - 1], word[length - 1]): None for word in words for length in range(2, len(word) + 1)}
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[*merges]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([begin, end])
    return TokenizerFiles(tokenizer.to_str().encode(), CHAT_TEMPLATE, (END_TOKEN,), begin, end)
