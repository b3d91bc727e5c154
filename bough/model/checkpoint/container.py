"""The interface of a checkpoint's container, for readers; `model_places` chooses the container of a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from bough.tokenization.vocabulary import TokenizerFiles

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """A tensor's location: `num_bytes` at `offset` of `file`."""

    name: str
    file: Path
    offset: int
    num_bytes: int
    dtype: str  # in safetensors' notation: "BF16", "F32", ..., or in GGUF's: "Q4_K", ...
    shape: tuple[int, ...]


class Container(Protocol):
    """A model's files: a folder of safetensors, or a GGUF file."""

    @property
    def path(self) -> Path:
        """The folder, or the file; or the id of a model on the hub that is to be found."""

    @property
    def name(self) -> str:
        """The model's name by its path."""

    @property
    def config_place(self) -> Path:
        """The file that states the configuration, for messages."""

    @staticmethod
    def is_hub_id(spelling: str) -> bool:
        """Whether a string has the form of such a model's id on the hub."""

    def exists(self) -> bool:
        """Whether the path exists and is of this kind."""

    def from_hub(self, **how: Any) -> str:
        """The local path of the model whose id is `path`, downloaded unless `how` forbids it.

        Raises:
            OSError, ValueError: as huggingface_hub does.
        """

    def tensors(self) -> dict[str, TensorPlace]:
        """All tensors by name, with consistent headers.

        Raises:
            CheckpointError: names a file that is missing, truncated or malformed.
        """

    def config(self) -> dict[str, Any]:
        """The fields of config.json, read without transformers.

        Raises:
            CheckpointError: they cannot be read, or a field of a GGUF file is not supported.
        """

    def model_config(self) -> PretrainedConfig:
        """The configuration in transformers' form; raises transformers' errors."""

    def description(self) -> bytes:
        """The bytes that a fingerprint covers in addition to tensors."""

    def tokenizer_files(self) -> TokenizerFiles:
        """The tokenizer.

        Raises:
            CheckpointError, OSError, ValueError, AttributeError, LookupError: there is no usable one.
        """

    def tokens(self) -> Sequence[str]:
        """The tokens of the tokenizer, read without transformers if possible; errors as of `tokenizer_files`."""
