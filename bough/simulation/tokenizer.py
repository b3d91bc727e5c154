"""A tokenizer for simulated models, made in memory: all bytes, so that any text can be encoded, and 512 words."""

from __future__ import annotations

import itertools
from functools import cache

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from bough.tokenization.vocabulary import TokenizerFiles

SYLLABLES = ("ka", "lo", "mi", "ne", "ru", "sa", "to", "vi")
NUM_WORDS = len(SYLLABLES) ** 3
NUM_BYTES = 256
BEGIN_TOKEN, END_TOKEN = NUM_BYTES, NUM_BYTES + 1
FIRST_WORD = NUM_BYTES + 2  # tokens from here on are words with a blank before them
_BLANK = "Ġ"  # how byte-level tokenizers spell it
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


@cache
def simulated_tokenizer() -> TokenizerFiles:
    """The same files at every call: a draft and a target that are simulated always fit together."""
    begin, end = "<|begin|>", "<|end|>"
    words = ["".join((_BLANK, *parts)) for parts in itertools.product(SYLLABLES, repeat=3)]
    beginnings = {word[:length]: None for word in words for length in range(2, len(word))}
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), begin, end, *words, *beginnings]
    merges = {(word[: length - 1], word[length - 1]): None for word in words for length in range(2, len(word) + 1)}
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[*merges]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([begin, end])
    return TokenizerFiles(tokenizer.to_str().encode(), CHAT_TEMPLATE, (END_TOKEN,), begin, end)
