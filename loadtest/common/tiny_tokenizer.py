"""A tokenizer of bytes, with a chat template, for random models and for workers without weights."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

CHAT_TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function | tojson }}\n{% endfor %}"
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}"
    '{% for call in m.tool_calls or [] %}{{ \'<tool_call>\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{ call.function.arguments | tojson }}{{ '}\n</tool_call>' }}{% endfor %}"
    "{{ '\n' }}{% endfor %}assistant:"
)
BOS, EOS = "<s>", "</s>"  # tokens 260 and 261


def save_tokenizer(folder: Path, swapped: bool = False) -> None:
    """Write a tokenizer of 256 bytes, four unused tokens and two special ones, as transformers writes it.

    `swapped` exchanges two of the bytes.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if swapped:
        alphabet[5], alphabet[6] = alphabet[6], alphabet[5]
    vocab = {token: index for index, token in enumerate([*alphabet, "<u0>", "<u1>", "<u2>", "<u3>"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in (BOS, EOS)])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"bos_token": BOS, "eos_token": EOS, "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
