"""A draft as a few megabytes beside its target's checkpoint: which layers to leave out, and corrections to the others.

`adapter.safetensors` holds `layers.I.NAME.down` (rank, inputs) and `.up` (outputs, rank) for a linear layer, whose
weight becomes W + up @ down, and `layers.I.NAME.weight` for a norm. I counts the target's layers without identity
copies. The manifest is written last: without it a folder is no adapter.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from bough.demonstration import EMBEDDED, EMBEDDED_DRAFT
from bough.errors import ConfigError
from bough.model.checkpoint import Checkpoint
from bough.model.files import make_folder, replace
from bough.model.layers import working_layers
from bough.model.loading import build_skeleton

MANIFEST_NAME = "bough_adapter.json"
WEIGHTS_NAME = "adapter.safetensors"
FORMAT = 1


@dataclass(frozen=True, slots=True)
class Manifest:
    """What an adapter fits, and how it came about."""

    base: str  # fingerprint of the target
    base_name: str
    num_layers: int  # of the target, without identity copies
    dropped_layers: tuple[int, ...]
    rank: int
    command: str
    seed: int
    written_tokens: int  # by the target
    trained_tokens: int  # some of them more than once
    held_out: str  # what the agreement was measured on
    top1: float
    top4: float
    untrained_top1: float  # of the same layers without corrections
    untrained_top4: float
    format: int = FORMAT


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """A manifest and its tensors."""

    manifest: Manifest
    tensors: Mapping[str, torch.Tensor]

    @classmethod
    def open(cls, folder: str | Path) -> Adapter:
        """Reads a folder that `bough distill` has finished.

        Raises:
            ConfigError: it is something else, or damaged.
        """
        path = Path(folder)
        try:
            content: dict[str, Any] = json.loads((path / MANIFEST_NAME).read_text())
            if content.get("format") != FORMAT:
                raise ConfigError(f"adapter: {path} has format {content.get('format')}; {FORMAT} can be read")
            content["dropped_layers"] = tuple(content["dropped_layers"])
            adapter = cls(Manifest(**content), load_file(path / WEIGHTS_NAME))
        except FileNotFoundError as exc:
            raise ConfigError(
                f"adapter: {exc.filename} is missing; a folder that `bough distill` wrote would do"
            ) from exc
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as exc:
            raise ConfigError(f"adapter: {path} is damaged: {exc}") from exc
        kept = tuple(f"layers.{index}." for index in adapter.kept_layers())
        strays = [name for name in adapter.tensors if not name.startswith(kept)]
        if strays:
            raise ConfigError(f"adapter: {path} is damaged: {strays[0]} is of no layer that is kept")
        return adapter

    def save(self, folder: Path) -> None:
        """At once or not at all."""
        make_folder("--out", folder)
        tensors = {name: tensor.contiguous() for name, tensor in self.tensors.items()}
        (folder / MANIFEST_NAME).unlink(missing_ok=True)
        replace(folder / WEIGHTS_NAME, lambda partial: save_file(tensors, partial))
        replace(folder / "README.md", lambda partial: partial.write_text(card(self.manifest)))
        text = json.dumps(asdict(self.manifest), indent=1)
        replace(folder / MANIFEST_NAME, lambda partial: partial.write_text(text))

    def require_base(self, checkpoint: Checkpoint) -> None:
        """Makes sure that a checkpoint is what the adapter was made from.

        Raises:
            ConfigError: naming both fingerprints.
        """
        found = base_fingerprint(checkpoint)
        if found != self.manifest.base:
            raise ConfigError(
                f"adapter: made for a model {self.manifest.base_name} with fingerprint {self.manifest.base}; "
                f"{checkpoint.folder.name} has {found}"
            )

    def fingerprint(self) -> str:
        """Of its tensors."""
        digest = hashlib.blake2b(digest_size=12)
        for name, tensor in sorted(self.tensors.items()):
            digest.update(f"{name} {list(tensor.shape)}\n".encode())
            digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def kept_layers(self) -> tuple[int, ...]:
        """Layers of the target that the draft has, without identity copies."""
        return tuple(i for i in range(self.manifest.num_layers) if i not in set(self.manifest.dropped_layers))

    @torch.no_grad()
    def correct(self, place: int, layer: nn.Module) -> None:
        """Corrects the weights of a kept layer, reckoned in float32 and rounded to the data type that they have.

        `place` is the layer's among those that are kept.

        Raises:
            ConfigError: a correction has no place in the layer.
        """
        prefix = f"layers.{self.kept_layers()[place]}."
        paths = {name.removeprefix(prefix).rpartition(".")[0] for name in self.tensors if name.startswith(prefix)}
        for path in sorted(paths):
            try:
                weight = layer.get_submodule(path).get_parameter("weight")
            except AttributeError as exc:
                raise ConfigError(f"adapter: {prefix}{path} does not fit the model: {exc}") from exc
            weight.copy_(self.corrected(place, path, weight))

    @torch.no_grad()
    def corrected(self, place: int, path: str, weight: torch.Tensor) -> torch.Tensor:
        """What the weight of one module of such a layer becomes, itself where there is no correction for it.

        Raises:
            ConfigError: the correction does not fit.
        """
        name = f"layers.{self.kept_layers()[place]}.{path}"
        device = weight.device
        try:
            if (norm := self.tensors.get(f"{name}.weight")) is not None:
                return norm.to(weight).expand_as(weight)
            if (up := self.tensors.get(f"{name}.up")) is not None:
                down = self.tensors[f"{name}.down"]
                return (weight.float() + up.to(device).float() @ down.to(device).float()).to(weight.dtype)
        except (KeyError, RuntimeError) as exc:
            raise ConfigError(f"adapter: {name} does not fit the model: {exc}") from exc
        return weight


def open_adapter(named: str, drop_layers: tuple[int, ...]) -> Adapter:
    """The adapter that settings name, a folder or `bough.demonstration.EMBEDDED`.

    Raises:
        ConfigError: it is none, or the settings leave out other layers than it does.
    """
    adapter = Adapter.open(EMBEDDED_DRAFT if named == EMBEDDED else named)
    dropped = adapter.manifest.dropped_layers
    if drop_layers and set(drop_layers) != set(dropped):
        raise ConfigError(
            f"--drop-layers: {', '.join(map(str, drop_layers))}; the adapter {named} leaves out "
            f"{', '.join(map(str, dropped))}"
        )
    return adapter


def base_fingerprint(checkpoint: Checkpoint) -> str:
    """Names a target by its layers that work: shapes, data types and the first bytes of every tensor, in order.

    So a block-expanded checkpoint has the fingerprint of the model that it expands, and reading it takes moments.
    """
    skeleton = build_skeleton(checkpoint, torch.bfloat16, working_layers(checkpoint))
    digest = hashlib.blake2b(type(skeleton.model).__name__.encode(), digest_size=12)
    for slots in (*skeleton.layer_slots, skeleton.resident_slots):
        for slot in slots:
            for place in slot.source.places:
                digest.update(f"{slot.key} {place.dtype} {place.shape}\n".encode())
                digest.update(place.first_bytes())
    return digest.hexdigest()


def card(manifest: Manifest) -> str:
    """README of an adapter."""
    kept = manifest.num_layers - len(manifest.dropped_layers)
    left_out = ", ".join(map(str, manifest.dropped_layers))
    return f"""# A draft for {manifest.base_name}

{kept} of the {manifest.num_layers} layers of {manifest.base_name} (left out: {left_out}), with low-rank corrections
of rank {manifest.rank} to the weights of those that are left, healed by distillation on text that the model wrote
itself. It is no model of its own: bough applies it to the target's weights as it loads them.

    python -m draft_worker --model {manifest.base_name} --adapter THIS_FOLDER

It was made, and can be made again, by

    {manifest.command}

where {manifest.base_name} is the folder of the target, and other names of files are those of that run.

- text: {manifest.written_tokens} tokens written by the target, seed {manifest.seed}
- training: {manifest.trained_tokens} tokens, some of them more than once
- agreement with the target on {manifest.held_out}: top-1 {manifest.top1:.3f}, top-4 {manifest.top4:.3f}
  (the same layers without corrections: {manifest.untrained_top1:.3f}, {manifest.untrained_top4:.3f})
- target: fingerprint {manifest.base}
"""
