"""The tokenizer of a GGUF file; transformers is used only if tokens are not in GPT-2's byte encoding.

A file names the expressions that split texts before pairs are merged: those of the tokenizer.json that the model was
published with. The names and their meanings are from llama.cpp's list (llama-vocab.cpp). transformers knows fewer
names, loses the meaning of some tokens, and takes many seconds.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from bough.errors import CheckpointError
from bough.model.checkpoint.gguf_file import GgufHeader
from bough.tokenization.vocabulary import TokenizerFiles

if TYPE_CHECKING:
    from tokenizers.pre_tokenizers import PreTokenizer

ENDS = ("eos", "eot", "eom")  # of a text, a turn, a message
KIND, SPLIT = "tokenizer.ggml.model", "tokenizer.ggml.pre"
BYTES = "gpt2"  # of KIND: these tokenizers
CONTROL, GIVEN, UNUSED = 3, 4, 5  # types of tokens: special; matched whole, but not special; to fill up embeddings

_SHORT = r"'s|'t|'re|'ve|'m|'ll|'d"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_START = r"[^\r\n\p{L}\p{N}]?"  # a sign or space before a word
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _words(digits: str, letters: str = r"\p{L}") -> str:
    """Llama 3's expression, and those made from it."""
    own = letters if letters == r"\p{L}" else f"[{letters}]"
    return rf"(?i:{_SHORT})|{_START}{own}+|{digits}| ?[^\s{letters}\p{{N}}]+[\r\n]*|{_SPACES}"


def _cased(digits: str, ending: str) -> str:
    """The expression of OpenAI's o200k and Mistral's Tekken: words also end before a capital letter."""
    words = rf"{_START}{_UPPER}*{_LOWER}+{ending}|{_START}{_UPPER}+{_LOWER}*{ending}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"


class Split(NamedTuple):
    """How texts are split, each expression within the pieces of the previous one, and related settings."""

    names: str
    expressions: Sequence[str]
    is_whole_first: bool = False  # a piece that is a token is used as it is, without merging
    has_bos: bool = False  # texts begin with it unless the file says otherwise
    is_composed: bool = False  # texts are normalised to Unicode's NFC


_GPT2 = rf"{_SHORT}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+"
_ASCII_SIGNS = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""
_DEEPSEEK_WORDS = rf"{_ASCII_SIGNS}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+[\r\n]*"
SPLITS = (
    Split("gpt-2 phi-2 olmo exaone4", (_GPT2,)),
    Split("smollm starcoder refact codeshell exaone minerva-7b", (r"\p{N}", _GPT2)),
    Split("command-r", (r"\p{N}", _GPT2), is_composed=True),
    Split("llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2", (_words(r"\p{N}{1,3}"),), True, True),
    Split("dbrx smaug-bpe glm4 chatglm-bpe jina-v5-nano", (_words(r"\p{N}{1,3}"),)),
    Split("qwen2", (_words(r"\p{N}"),), is_composed=True),
    Split("deepseek-r1-qwen stablelm2 kormo f2llmv2 megrez hunyuan solar-open grok-2", (_words(r"\p{N}"),)),
    Split("qwen35", (_words(r"\p{N}", letters=r"\p{L}\p{M}"),), is_composed=True),
    Split("tekken", (_cased(r"\p{N}", ""),), True, True),
    Split("gpt-4o llama4 kanana2 talkie minimax-m2", (_cased(r"\p{N}{1,3}", f"(?i:{_SHORT})?"),)),
    Split(
        "deepseek-v3 hunyuan-dense joyai-llm", (r"\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+", f"{_DEEPSEEK_WORDS}|{_SPACES}")
    ),
    Split("deepseek-coder", (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+", r"\p{N}")),
)
BY_NAME = {name: split for split in SPLITS for name in split.names.split()}
logger = logging.getLogger(__name__)


def gguf_tokenizer(header: GgufHeader) -> TokenizerFiles:
    """The tokenizer of a file, with its special tokens and chat templates.

    Raises:
        CheckpointError, OSError, ValueError, AttributeError, LookupError: there is no usable one.
    """
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
    """The tokenizer.json next to a file, or a tokenizer from the file's lists; if both fail, the first error."""
    try:
        found = _next_to_file(header, tokens)
    except (OSError, CheckpointError) as exc:
        with suppress(Exception):  # the library raises nothing narrower
            data = _own(header)
            logger.warning("%s; the file's own tokenizer is used", exc)
            return data
        raise
    return _own(header) if found is None else found


def _own(header: GgufHeader) -> bytes:
    if header.fields.get(KIND) == BYTES:
        return json.dumps(byte_tokenizer(header), ensure_ascii=False).encode()
    from transformers import AutoTokenizer

    name = header.file.name
    converted = AutoTokenizer.from_pretrained(header.file.parent, trust_remote_code=False, gguf_file=name)
    return bytes(converted.backend_tokenizer.to_str().encode())


def _next_to_file(header: GgufHeader, tokens: list[str]) -> bytes | None:
    """The tokenizer.json of the model's authors next to a file, if it has the file's tokens."""
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
    """The tokens; read at once, as the library refuses, for example, merges of texts that are not tokens."""
    try:
        return files.vocabulary
    except Exception as exc:  # the library raises nothing narrower
        raise header.refusal(f"no usable tokenizer{where}: {exc}") from exc


def pre_tokenizer(split: Split) -> PreTokenizer:
    """The step that splits texts and encodes their bytes."""
    from tokenizers import Regex, pre_tokenizers

    expressions = [pre_tokenizers.Split(Regex(each), "isolated") for each in split.expressions]
    return pre_tokenizers.Sequence([*expressions, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def byte_tokenizer(header: GgufHeader) -> dict[str, Any]:
    """The fields of a tokenizer.json for such a file.

    Raises:
        CheckpointError: the way of splitting texts is unknown, or lists are inconsistent.
    """
    from tokenizers import decoders, normalizers

    name = header.fields.get(SPLIT, "gpt-2")
    if (split := BY_NAME.get(name)) is None:
        raise header.refusal(
            f"field {SPLIT} must be one of {', '.join(BY_NAME)}, unless the model's tokenizer.json is next to the "
            f"file, got {name!r}"
        )
    tokens, types = header.list_of("tokenizer.ggml.tokens"), header.list_of("tokenizer.ggml.token_type")
    if len(types or tokens) != len(tokens) or len(set(tokens)) != len(tokens):
        raise header.refusal(
            f"field tokenizer.ggml.tokens must have different texts, with as many of token_type, got {len(tokens)}, "
            f"of which {len(set(tokens))} differ, with {len(types)}"
        )
    kinds = dict(zip(tokens, types or [1] * len(tokens), strict=True))
    vocabulary = {token: index for index, token in enumerate(tokens) if kinds[token] != UNUSED}
    return {
        "version": "1.0",
        "added_tokens": [
            _added(token, index, kinds[token])
            for token, index in vocabulary.items()
            if kinds[token] in (CONTROL, GIVEN)
        ],
        "normalizer": _state(normalizers.NFC()) if split.is_composed else None,
        "pre_tokenizer": _state(pre_tokenizer(split)),
        "post_processor": _ends(header, tokens, split.has_bos),
        "decoder": _state(decoders.ByteLevel()),
        "model": {
            "type": "BPE",
            "ignore_merges": split.is_whole_first,
            "vocab": vocabulary,
            "merges": header.list_of("tokenizer.ggml.merges"),
        },
    }


def _state(part: Any) -> Any:
    return json.loads(part.__getstate__())


def _added(token: str, index: int, kind: int) -> dict[str, Any]:
    never = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": index, "content": token, "special": kind == CONTROL, **never}


def _ends(header: GgufHeader, tokens: Sequence[str], has_bos: bool) -> Any:
    """The special tokens that a text begins and ends with."""
    from tokenizers import processors

    of_file = {"bos": has_bos, "eos": False}
    wanted = {key: header.fields.get(f"tokenizer.ggml.add_{key}_token", given) for key, given in of_file.items()}
    found = {key: header.token_id(key, len(tokens)) for key, is_wanted in wanted.items() if is_wanted}
    own = {key: (tokens[index], index) for key, index in found.items() if index is not None}
    if not own:
        return None
    single = [*(own[key][0] for key in ("bos",) if key in own), "$A", *(own[key][0] for key in ("eos",) if key in own)]
    return _state(processors.TemplateProcessing(single=single, special_tokens=list(own.values())))
