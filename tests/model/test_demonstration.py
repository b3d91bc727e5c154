"""The demonstration model is written once, even if several processes want it at the same time."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from bough.config.cache_paths import EXPANSION_NAME, demonstration_folder, is_written, original_file
from bough.errors import ConfigError
from bough.model import write_demonstration as writing
from bough.model.checkpoint.gguf_file import read_gguf
from bough.model.checkpoint.gguf_model import gguf_config
from bough.model.checkpoint.gguf_tokenizer import gguf_tokenizer
from bough.model.checkpoint.safetensors_folder import SafetensorsFolder
from bough.processes import demonstration
from bough.tokenization.chat_template import ChatTemplate
from bough.tokenization.demonstration_template import DEMONSTRATION_TEMPLATE, TEMPLATE_NAME
from bough.tokenization.tokenizer import Tokenizer
from orchestrator.tools.formats import HERMES, format_of

TRANSFORMERS_FILES = {
    "block-000.safetensors": "46652befe3bda7e8",
    "block-017.safetensors": "1d438fe5a69a3681",
    "outside-blocks.safetensors": "a6be7c64194dc539",
}


def test_a_second_process_waits_and_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BOUGH_CACHE_DIR", str(tmp_path / "new"))
    written = []

    def write(folder: Path, copies: int) -> None:
        time.sleep(0.2)
        folder.mkdir()
        (folder / EXPANSION_NAME).write_text(json.dumps({"copies": copies}))
        written.append(folder)

    monkeypatch.setattr(demonstration, "_write_demonstration", write)
    with ThreadPoolExecutor(3) as pool:
        for waiting in [pool.submit(demonstration.ensure_demonstration, 2) for _ in range(3)]:
            waiting.result()
    assert written == [demonstration_folder(2)]


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("BOUGH_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match=r"file/smollm2-135m-x3: .*exists.*; set BOUGH_CACHE_DIR to"):
        demonstration.ensure_demonstration(2)


def test_files_of_a_killed_run_are_removed_and_a_failed_run_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object, folder: Path) -> None:
        (folder / "part").touch()
        raise ConfigError("no more")

    leftover = tmp_path / "model.partial-1"
    leftover.mkdir()
    monkeypatch.setattr(writing, "write_tokenizer", fail)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0 if leftover.exists() else 10**12))
    with pytest.raises(ConfigError, match="no more"):
        writing.write_demonstration(tmp_path / "model", 1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_weights_equal_transformers(tmp_path: Path) -> None:
    """Bit for bit: the hashes are of files that `from_pretrained(..., gguf_file=...)` and `save_file` have written."""
    model = tmp_path / "model"
    writing.write_demonstration(model, 0)
    hashes = {name: hashlib.sha256((model / name).read_bytes()).hexdigest()[:16] for name in TRANSFORMERS_FILES}
    assert hashes == TRANSFORMERS_FILES
    assert read_gguf(original_file()).fields["llama.block_count"] == len(list(model.glob("block-*.safetensors")))


def test_copies_of_a_block_change_nothing(tmp_path: Path) -> None:
    """Their outputs are multiplied by zeros; all else is the block's own."""
    header = read_gguf(original_file())
    tensors = writing.expanded_block(header, gguf_config(header.file), index=3, copies=2)
    assert {name.split(".")[2] for name in tensors} == {"9", "10", "11"}
    for name in writing.BLOCK_TENSORS.values():
        original, *copies = (tensors[f"model.layers.{layer}.{name}.weight"] for layer in (9, 10, 11))
        assert original.any()
        for copy in copies:
            is_zero = name in ("self_attn.o_proj", "mlp.down_proj")
            np.testing.assert_array_equal(copy, np.zeros_like(original) if is_zero else original)


def test_the_tokenizer_splits_digits_like_in_training(tmp_path: Path) -> None:
    header = read_gguf(original_file())
    writing.write_tokenizer(header, tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    files = SafetensorsFolder(tmp_path).tokenizer_files()
    assert (files.bos_token, files.eos_token, files.eos_token_ids) == ("<|im_start|>", "<|im_end|>", (2,))
    assert files.fingerprint == gguf_tokenizer(header).fingerprint
    tokenizer = Tokenizer(files)
    assert [tokenizer.decode([token]) for token in tokenizer.encode("in 2026.")] == ["in", " ", "2", "0", "2", "6", "."]


@pytest.mark.parametrize("manifest", ["", "[]", "{}", "3", '{"copies": 1}'])
def test_a_truncated_manifest_counts_as_none(tmp_path: Path, manifest: str) -> None:
    (tmp_path / EXPANSION_NAME).write_text(manifest)
    assert not is_written(tmp_path, 2)


def test_a_model_of_an_earlier_version_gets_the_template_with_tools(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BOUGH_CACHE_DIR", str(tmp_path))
    folder = demonstration_folder(2)
    folder.mkdir()
    (folder / EXPANSION_NAME).write_text('{"copies": 2}')
    (folder / TEMPLATE_NAME).write_text("without tools")
    demonstration.ensure_demonstration(2)
    assert (folder / TEMPLATE_NAME).read_text() == DEMONSTRATION_TEMPLATE


@pytest.mark.parametrize(
    "messages",
    [
        [("user", "x")],
        [("system", "Be kind."), ("user", " x\n")],
        [("user", "a"), ("assistant", " b\n"), ("user", "c"), ("system", "d")],
        [("system", "s"), ("system", "t"), ("user", "u")],
        [],
    ],
)
def test_without_tools_the_template_is_the_models_own(messages: list[tuple[str, str]]) -> None:
    own = ChatTemplate(read_gguf(original_file()).fields["tokenizer.chat_template"], "", "")
    assert ChatTemplate(DEMONSTRATION_TEMPLATE, "", "").render(messages) == own.render(messages)


def test_calls_are_in_a_supported_format() -> None:
    template = ChatTemplate(DEMONSTRATION_TEMPLATE, "", "")
    assert format_of("auto", template) is HERMES
    call = {"function": {"name": "sky", "arguments": {"at": "Rome"}}}
    messages = [{"role": "system", "content": "Be kind."}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    answers = [{"role": "tool", "content": text} for text in ("Blue.", "Grey.")]
    text = template.render_objects([*messages, *answers], [{"type": "function", "function": {"name": "sky"}}])
    assert text.count("Be kind.") == 1
    assert '<tool_call>\n{"name": "sky", "arguments": {"at": "Rome"}}\n</tool_call><|im_end|>' in text
    assert text.count("<|im_start|>user") == 1, "answers to calls are one message"
