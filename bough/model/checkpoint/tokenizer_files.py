"""Loads the tokenizer of a model folder or a GGUF file."""

from __future__ import annotations

import json
import logging
from contextlib import suppress
from pathlib import Path
from typing import Any

from bough.errors import CheckpointError
from bough.model.checkpoint.gguf_file import GgufHeader, is_gguf, read_gguf
from bough.model.checkpoint.gguf_tokenizer import BYTES, KIND, byte_tokenizer
from bough.tokenization.vocabulary import TokenizerFiles

ENDS = ("eos", "eot", "eom")  # of a text, a turn, a message
logger = logging.getLogger(__name__)


def load_tokenizer_files(path: Path) -> TokenizerFiles:
    """Read the tokenizer of a folder or a GGUF file.

    Raises:
        CheckpointError: there is no usable tokenizer.
    """
    try:
        return _of_file(read_gguf(path)) if is_gguf(path) else _of_folder(path)
    except (OSError, ValueError, AttributeError, LookupError) as exc:
        raise CheckpointError(f"{path}: no usable tokenizer: {exc}") from exc


def _of_folder(folder: Path) -> TokenizerFiles:
    """Through transformers, which converts many formats."""
    tokenizer = _converted(folder)
    eos: set[int] = {tokenizer.eos_token_id} if tokenizer.eos_token_id is not None else set()
    given = tokenizer.chat_template  # one, or several by name
    templates = given if isinstance(given, dict) else {"default": given or ""}
    return TokenizerFiles(
        tokenizer.backend_tokenizer.to_str().encode(),
        templates.get("default", ""),
        tuple(sorted(eos | _configured_ends(folder))),
        tokenizer.bos_token or "",
        tokenizer.eos_token or "",
        templates.get("tool_use", ""),
    )


def _of_file(header: GgufHeader) -> TokenizerFiles:
    tokens = header.list_of("tokenizer.ggml.tokens")
    if not all(isinstance(token, str) for token in tokens):
        raise header.refusal(f"field tokenizer.ggml.tokens must be texts, got {tokens[0]!r}")
    template, tool_template = (_template(header, f"tokenizer.chat_template{name}") for name in ("", ".tool_use"))
    ids = {key: header.token_id(key, len(tokens)) for key in ("bos", *ENDS)}
    names = {key: "" if index is None else tokens[index] for key, index in ids.items()}
    files = TokenizerFiles(
        _json_of(header, tokens),
        template,
        tuple(sorted({index for key in ENDS if (index := ids[key]) is not None})),
        names["bos"],
        names["eos"],
        tool_template,
    )
    _require_usable(files, header)
    return files


def _template(header: GgufHeader, key: str) -> str:
    if not isinstance(found := header.fields.get(key, ""), str):
        raise header.refusal(f"field {key} must be a text, got {found!r}")
    return found


def _json_of(header: GgufHeader, tokens: list[str]) -> bytes:
    """The tokenizer.json beside a file, or what its own lists say; the first one's error where neither can be read."""
    try:
        beside = _beside(header, tokens)
    except (OSError, CheckpointError) as exc:
        with suppress(Exception):  # of a library that raises nothing narrower
            data = _own(header)
            logger.warning("%s; the file's own tokenizer is used", exc)
            return data
        raise
    return _own(header) if beside is None else beside


def _own(header: GgufHeader) -> bytes:
    if header.fields.get(KIND) == BYTES:
        return json.dumps(byte_tokenizer(header), ensure_ascii=False).encode()
    converted = _converted(header.file.parent, gguf_file=header.file.name)
    return bytes(converted.backend_tokenizer.to_str().encode())


def _beside(header: GgufHeader, tokens: list[str]) -> bytes | None:
    """The tokenizer.json beside a file, as the model's authors have it, if it has the file's tokens."""
    file = header.file.with_name("tokenizer.json")
    if not file.is_file():
        return None
    files = TokenizerFiles(file.read_bytes(), "", ())
    found = _require_usable(files, header, f" ({file})")
    types = header.list_of("tokenizer.ggml.token_type") or [1] * len(tokens)
    pairs = zip(tokens, found, types, strict=False)
    if len(found) > len(tokens) or any(own != other for own, other, kind in pairs if kind == 1):
        logger.warning("%s: %s has other tokens and is not used", header.file, file)
        return None
    logger.info("%s: the tokenizer is %s", header.file, file)
    return files.tokenizer_json


def _require_usable(files: TokenizerFiles, header: GgufHeader, where: str = "") -> tuple[str, ...]:
    """The tokens; asked for at once, as the library refuses, for example, merges of texts that are no tokens."""
    try:
        return files.vocabulary
    except Exception as exc:  # the library raises nothing narrower
        raise header.refusal(f"no usable tokenizer{where}: {exc}") from exc


def _converted(folder: Path, **place: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, trust_remote_code=False, **place)


def _configured_ends(folder: Path) -> set[int]:
    """Ends of a text by generation_config.json, which is optional."""
    from transformers import GenerationConfig

    try:
        configured = GenerationConfig.from_pretrained(folder).eos_token_id
    except OSError:
        return set()
    return set(configured if isinstance(configured, list) else [configured]) - {None}
