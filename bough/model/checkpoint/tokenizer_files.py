"""Loads the tokenizer of a model folder."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoTokenizer, GenerationConfig

from bough.errors import CheckpointError
from bough.tokenization.vocabulary import TokenizerFiles


def load_tokenizer_files(folder: Path) -> TokenizerFiles:
    """Read a tokenizer through transformers, which converts many formats.

    Raises:
        CheckpointError: there is no usable tokenizer.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        data = tokenizer.backend_tokenizer.to_str().encode()
    except (OSError, ValueError, AttributeError) as exc:
        raise CheckpointError(f"{folder}: no usable tokenizer: {exc}") from exc
    eos: set[int] = {tokenizer.eos_token_id} if tokenizer.eos_token_id is not None else set()
    try:
        configured = GenerationConfig.from_pretrained(folder).eos_token_id
        eos |= set(configured if isinstance(configured, list) else [configured]) - {None}
    except OSError:
        pass  # the file is optional
    given = tokenizer.chat_template  # one, or several by name
    templates = given if isinstance(given, dict) else {"default": given or ""}
    return TokenizerFiles(
        data,
        templates.get("default", ""),
        tuple(sorted(eos)),
        tokenizer.bos_token or "",
        tokenizer.eos_token or "",
        templates.get("tool_use", ""),
    )
