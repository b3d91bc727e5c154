"""Loads the tokenizer of a model folder or a GGUF file."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoTokenizer, GenerationConfig

from bough.errors import CheckpointError
from bough.model.checkpoint.gguf_file import is_gguf, read_gguf
from bough.tokenization.vocabulary import TokenizerFiles

ENDS = [f"tokenizer.ggml.{kind}_token_id" for kind in ("eos", "eot", "eom")]  # of a text, a turn, a message
GPT2, SPLITS = "gpt-2", "Split("  # how texts are split that name nothing else, and what tells of another way
KIND, SPLIT = "tokenizer.ggml.model", "tokenizer.ggml.pre"  # and how texts are split before pairs of bytes are merged


def load_tokenizer_files(path: Path) -> TokenizerFiles:
    """Read the tokenizer of a folder or a GGUF file through transformers, which converts many formats.

    Raises:
        CheckpointError: there is no usable tokenizer.
    """
    fields = read_gguf(path).fields if is_gguf(path) else {}
    place = {"gguf_file": path.name} if fields else {}
    try:
        tokenizer = AutoTokenizer.from_pretrained(path.parent if fields else path, trust_remote_code=False, **place)
        data = tokenizer.backend_tokenizer.to_str().encode()
    except (OSError, ValueError, AttributeError, LookupError) as exc:
        raise CheckpointError(f"{path}: no usable tokenizer: {exc}") from exc
    is_split = SPLITS in str(tokenizer.backend_tokenizer.pre_tokenizer)
    if fields.get(KIND) == "gpt2" and not is_split and (split := fields.get(SPLIT, GPT2)) != GPT2:
        raise CheckpointError(  # which would be split as GPT-2's
            f"{path}: field {SPLIT} must be a split that transformers knows, such as llama-bpe or qwen2, got {split!r}"
        )
    eos: set[int] = {tokenizer.eos_token_id} if tokenizer.eos_token_id is not None else set()
    eos |= {fields[key] for key in ENDS if key in fields}
    if not fields:
        eos |= _configured_ends(path)
    given = tokenizer.chat_template  # one, or several by name
    templates = given if isinstance(given, dict) else {"default": given or ""}
    if tools := fields.get("tokenizer.chat_template.tool_use"):
        templates["tool_use"] = tools
    return TokenizerFiles(
        data,
        templates.get("default", ""),
        tuple(sorted(eos)),
        tokenizer.bos_token or "",
        tokenizer.eos_token or "",
        templates.get("tool_use", ""),
    )


def _configured_ends(folder: Path) -> set[int]:
    """Ends of a text by generation_config.json, which is optional."""
    try:
        configured = GenerationConfig.from_pretrained(folder).eos_token_id
    except OSError:
        return set()
    return set(configured if isinstance(configured, list) else [configured]) - {None}
