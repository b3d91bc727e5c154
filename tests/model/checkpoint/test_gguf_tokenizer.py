"""Tokenizers of GGUF files: split as published, each token what its type says; headers read as the library does."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGUFWriter
from tokenizers import pre_tokenizers
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS, set_split_regex

from bough.errors import CheckpointError
from bough.model.checkpoint.gguf_file import ListPlace, read_gguf
from bough.model.checkpoint.gguf_tokenizer import BY_NAME, pre_tokenizer
from bough.model.checkpoint.model_places import load_tokenizer_files
from bough.tokenization.tokenizer import Tokenizer
from tests.fakes.model.gguf_files import finish

TEXT = (
    "It's DON'T HTTPServer camelCase  12345.678 x=a/b//\n\n\r\n  Ünïcode naı̈ve नमस्ते ١٢٣ 漢字かな한글 \t(end)!? "
    "\u2028 A'B 'Twas\n/path/to ...\u00a0  \n   trailing   "
)
TOKENS = ["<s>", "</s>", "<think>", "a", "b", "c", "1", "2", "Ġ", "ab", "abc", "12", "[PAD12]", "[PAD13]"]
TYPES = [3, 3, 4, 1, 1, 1, 1, 1, 1, 1, 1, 1, 5, 5]
MERGES = ["a b", "1 2"]  # of which none leads to "abc"


def write(file: Path, split: str | None, **changed: Any) -> Path:
    """A file with a small tokenizer."""
    writer = GGUFWriter(file, "llama")
    fields: dict[str, Any] = {
        "tokens": TOKENS,
        "token_type": TYPES,
        "merges": MERGES,
        "bos_token_id": 0,
        "eos_token_id": 1,
    } | changed
    writer.add_tokenizer_model("gpt2")
    if split:
        writer.add_tokenizer_pre(split)
    for name, value in fields.items():
        if isinstance(value, bool):
            writer.add_bool(f"tokenizer.ggml.{name}", value)
        elif isinstance(value, int):
            writer.add_uint32(f"tokenizer.ggml.{name}", value)
        else:
            writer.add_array(f"tokenizer.ggml.{name}", value)
    writer.add_chat_template("{{ messages }}")
    writer.add_tensor("token_embd.weight", np.zeros((14, 32), np.float32))
    writer.add_tensor("blk.0.attn_q.weight", np.ones((32, 32), np.float16))
    finish(writer)
    return file


def pieces(name: str) -> list[str]:
    return [piece for piece, _ in pre_tokenizer(BY_NAME[name]).pre_tokenize_str(TEXT)]


def published(name: str) -> list[str]:
    """By the expression that transformers has for a name."""

    class Backend:
        pre_tokenizer: Any = None

    class Owner:
        backend_tokenizer = Backend()

    owner = set_split_regex(Owner(), {"pre_tokenizer_type": name})
    return [piece for piece, _ in owner.backend_tokenizer.pre_tokenizer.pre_tokenize_str(TEXT)]


def test_texts_are_split_like_transformers_does() -> None:
    assert not set(GGUF_PRE_TOKENIZER_SPLITS) - set(BY_NAME)
    for name in GGUF_PRE_TOKENIZER_SPLITS:
        assert pieces(name) == published(name), name
    assert len({tuple(pieces(split.split()[0])) for split in {each.names for each in BY_NAME.values()}}) == 9


def test_digits_are_split_like_the_models_own_tokenizer() -> None:
    """SmolLM's, StarCoder's and Cohere's tokenizer.json have the library's Digits and GPT-2's expression."""
    steps = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    wanted = [piece for piece, _ in pre_tokenizers.Sequence(steps).pre_tokenize_str(TEXT)]
    assert pieces("smollm") == pieces("command-r") == wanted
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(TEXT)
    assert pieces("gpt-2") == [piece for piece, _ in plain]


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("deepseek-v3", "It|'s| a| =| |123|45|漢字|(x|).\n\n| | end"),
        ("deepseek-coder", "It|'|s| a| = |1|2|3|4|5|漢字|(|x|).|\n|\n| | end"),
    ],
)
def test_deepseeks_expressions_split_texts(name: str, wanted: str) -> None:
    """As its tokenizer.json applies one after another."""
    text = "It's a = 12345漢字(x).\n\n  end"
    found = pre_tokenizer(BY_NAME[name]).pre_tokenize_str(text)
    assert "|".join(text[begin:end] for _, (begin, end) in found) == wanted


def test_each_token_has_the_kind_of_its_type(tmp_path: Path) -> None:
    """Special, matched whole, or there to fill up embeddings, which a smaller model of the family fills up less."""
    files = load_tokenizer_files(write(tmp_path / "a.gguf", "smollm"))
    tokenizer = Tokenizer(files)
    assert tokenizer.encode("ab12<think>abc</s>") == [9, 6, 7, 2, 9, 5, 1]
    assert files.vocabulary == tuple(TOKENS[:12])
    assert tokenizer.decode([9, 2, 1]) == "ab<think>"
    assert (files.eos_token_ids, files.bos_token, files.eos_token) == ((1,), "<s>", "</s>")
    assert files.chat_template == "{{ messages }}"


def test_each_split_has_its_normalizer_and_settings(tmp_path: Path) -> None:
    """Llama 3's tokenizer takes a whole piece where it is a token, and begins with BOS; a file may say otherwise."""
    cases = [("llama-bpe", {}, [0, 10, 11]), ("llama-bpe", {"add_bos_token": False}, [10, 11])]
    cases += [
        ("qwen2", {}, [9, 5, 6, 7]),
        ("qwen2", {"add_bos_token": True, "add_eos_token": True}, [0, 9, 5, 6, 7, 1]),
    ]
    for number, (name, fields, wanted) in enumerate(cases):
        files = load_tokenizer_files(write(tmp_path / f"{number}.gguf", name, **fields))
        assert Tokenizer(files).encode("abc12") == wanted


def test_a_tokenizer_next_to_the_file_is_used_if_its_tokens_match(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    known = load_tokenizer_files(write(tmp_path / "known.gguf", "qwen2"))
    file, beside = write(tmp_path / "unknown.gguf", "unheard-of"), tmp_path / "tokenizer.json"
    beside.write_bytes(known.tokenizer_json)
    assert load_tokenizer_files(file) == known
    assert f"the tokenizer is {beside}" in caplog.text
    other = json.loads(known.tokenizer_json)
    other["model"]["vocab"] |= {"c": 6, "1": 5}
    beside.write_text(json.dumps(other))
    with pytest.raises(CheckpointError, match=r"tokenizer\.ggml\.pre must be one of gpt-2, .*, got 'unheard-of'"):
        load_tokenizer_files(file)
    assert "tokenizer.json has other tokens and is not used" in caplog.text
    beside.write_text("{}")
    with pytest.raises(CheckpointError, match=r"unknown\.gguf: no usable tokenizer \(.*tokenizer\.json\): "):
        load_tokenizer_files(file)
    assert load_tokenizer_files(tmp_path / "known.gguf") == known
    assert "; the file's own tokenizer is used" in caplog.text


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tokens": [*TOKENS[:13], "a"]}, r"tokens must have different texts, .* got 14, of which 13 differ, with 14"),
        ({"token_type": TYPES[1:]}, r"with as many of token_type, got 14, of which 14 differ, with 13"),
        ({"merges": ["a z"]}, r"no usable tokenizer: .*Token `z` out of vocabulary"),
        ({"bos_token_id": 14}, r"field tokenizer\.ggml\.bos_token_id must be 0 to 13, the tokens' numbers, got 14"),
    ],
)
def test_a_tokenizer_that_does_not_match_is_refused(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=rf"a\.gguf: .*{message}"):
        load_tokenizer_files(write(tmp_path / "a.gguf", "qwen2", **fields))


def test_a_header_equals_what_the_library_reads(tmp_path: Path) -> None:
    file = write(tmp_path / "a.gguf", None)
    header, reader = read_gguf(file), gguf.GGUFReader(file)
    fields = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    assert fields == {
        key: header.list_of(key) if isinstance(value, ListPlace) else value for key, value in header.fields.items()
    }
    places = {
        each.name: (each.data_offset, each.n_bytes, tuple(reversed(each.shape.tolist()))) for each in reader.tensors
    }
    assert places == {name: (each.offset, each.num_bytes, each.shape) for name, each in header.tensors.items()}
    assert header.num_bytes == reader.data_offset
