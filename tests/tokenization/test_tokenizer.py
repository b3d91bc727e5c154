"""Chat templates: what models' own templates use, and what happens to one that cannot be read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest

from bough.errors import BoughError, InvalidRequest
from bough.model.checkpoint.model_places import load_tokenizer_files
from bough.tokenization.tokenizer import Tokenizer
from bough.tokenization.vocabulary import TokenizerFiles
from loadtest.common.tiny_tokenizer import save_tokenizer


def with_template(folder: Path, template: str) -> Tokenizer:
    save_tokenizer(folder)
    files = load_tokenizer_files(folder)
    return Tokenizer(TokenizerFiles(files.tokenizer_json, template, files.eos_token_ids))


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.content }}{% endfor %}", "one"),
        ("{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}", "onetwo"),
        ("{{ strftime_now('%%') }}{{ messages | length }}", "%2"),
        ("{{ messages[0] | tojson }}", '{"role": "user", "content": "one"}'),
    ],
)
def test_templates_may_use_transformers_functions(tmp_path: Path, template: str, text: str) -> None:
    tokenizer = with_template(tmp_path, template)
    assert tokenizer.decode(tokenizer.encode_chat([("user", "one"), ("assistant", "two")])) == text


def test_an_invalid_template_leaves_text_prompts_usable(tmp_path: Path) -> None:
    """It once ended the orchestrator's watch over its workers."""
    tokenizer = with_template(tmp_path, "{% nonsense %}")
    assert tokenizer.decode(tokenizer.encode("hello")) == "hello"
    with pytest.raises(InvalidRequest, match=r"chat: this model's chat template cannot be read: .*nonsense"):
        tokenizer.encode_chat([("user", "hello")])


def test_a_refusal_by_a_template_is_the_requests_fault(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        with_template(tmp_path, "{{ raise_exception('roles must alternate') }}").encode_chat([("user", "hello")])


class PanicException(BaseException):
    """As that of pyo3, which is no Exception, so that a request had no answer."""


@pytest.mark.parametrize("use", [lambda tokenizer: tokenizer.encode("x"), lambda tokenizer: tokenizer.decode([1])])
def test_a_panic_of_the_library_is_an_error(tmp_path: Path, use: Callable[[Tokenizer], object]) -> None:
    save_tokenizer(tmp_path)
    tokenizer, panic = Tokenizer(load_tokenizer_files(tmp_path)), Mock(side_effect=PanicException("out of bounds"))
    tokenizer._tokenizer = Mock(encode_batch_fast=panic, decode=panic)
    with pytest.raises(BoughError, match="the tokenizer has failed: out of bounds"):
        use(tokenizer)
