"""A GGUF file as the container of a checkpoint. Uses no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bough.model.checkpoint.container import TensorPlace
from bough.model.checkpoint.gguf_config import gguf_config
from bough.model.checkpoint.gguf_file import files_of, read_gguf
from bough.model.checkpoint.gguf_tokenizer import gguf_tokenizer
from bough.tokenization.vocabulary import TokenizerFiles

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True, slots=True)
class GgufModel:
    """A container that is a file, or the first of the files of a split model."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def config_place(self) -> Path:
        return self.path

    @staticmethod
    def is_hub_id(spelling: str) -> bool:
        """Whether it is "organisation/name/file", where the file may be in a folder."""
        return spelling.count("/") >= 2

    def exists(self) -> bool:
        return self.path.is_file()

    def from_hub(self, **how: Any) -> str:
        from huggingface_hub import hf_hub_download

        organisation, name, file = str(self.path).split("/", 2)
        places = [each.as_posix() for each in files_of(Path(file))]
        found: list[str] = [hf_hub_download(f"{organisation}/{name}", place, **how) for place in places]
        return found[0]

    def tensors(self) -> dict[str, TensorPlace]:
        return dict(read_gguf(self.path).tensors)

    def config(self) -> dict[str, Any]:
        return gguf_config(self.path)

    def model_config(self) -> PretrainedConfig:
        from transformers import AutoConfig

        fields = self.config()
        rope = fields.pop("rope_parameters")
        config = AutoConfig.for_model(**fields)
        config.rope_parameters = rope  # afterwards, as factors are none of the types that its constructor knows
        return config

    def description(self) -> bytes:
        """What stands before the weights."""
        with self.path.open("rb") as stream:
            return stream.read(read_gguf(self.path).num_bytes)

    def tokenizer_files(self) -> TokenizerFiles:
        return gguf_tokenizer(read_gguf(self.path))

    def tokens(self) -> Sequence[str]:
        return self.tokenizer_files().vocabulary
