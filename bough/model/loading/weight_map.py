"""Maps a checkpoint's tensors to a model's parameters.

First packed tensors are combined (`X.qweight`, `X.scales`, ... are the value `X.weight`). Then transformers' own
mapping of checkpoint names to parameters is applied, so that everything it renames or stacks while loading is handled
here too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable

from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from bough.errors import CheckpointError
from bough.model.architecture.moe import AnySource, ExpertSources
from bough.model.checkpoint.checkpoint import Checkpoint
from bough.model.checkpoint.tensor_source import Joined, Stored, TensorSource
from bough.model.quant.format import PackedTensors, WeightFormat, in_language_model


def logical_sources(
    checkpoint: Checkpoint, quantization: WeightFormat | None, parameters: Collection[str] = ()
) -> dict[str, AnySource]:
    """The values of a checkpoint by name; packed ones under the name of their weight, a GGUF file's by `parameters`."""
    left = dict(checkpoint.tensors)
    sources: dict[str, AnySource] = {}
    spare = quantization.spare if quantization is not None else ()
    if quantization is not None:
        for name, place in checkpoint.tensors.items():
            if (weight := quantization.weight_name(place)) is not None:
                sources[weight] = quantization.source(name, PackedTensors(left, checkpoint.has_data))
    sources.update({name: Stored(place) for name, place in left.items() if not name.endswith(spare)})
    return quantization.named(sources, parameters) if quantization is not None else in_language_model(sources)


class WeightMap:
    """Sources by transformers' parameter names."""

    def __init__(self, model: PreTrainedModel, known: Collection[str], sources: dict[str, AnySource]) -> None:
        """`known` are the parameter names of the whole checkpoint, even if the model has fewer layers."""
        transforms = get_model_conversion_mapping(model)
        renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
        converters = [t for t in transforms if isinstance(t, WeightConverter)]
        by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
        self._converters: dict[str, WeightConverter | None] = {}
        self._parts: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
        self._sources = sources
        names = dict.fromkeys(known, True)
        for name in sorted(sources, key=dot_natural_key):
            target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, names)
            if target not in names and name in names:
                target, pattern = name, None
            self._parts[target][pattern or ""].append(name)
            self._converters[target] = by_pattern[pattern] if pattern else None
        self._claimed: set[str] = set()

    def source(self, name: str) -> AnySource | None:
        """The source of a parameter; None if the checkpoint has none.

        Raises:
            CheckpointError: transformers would combine the tensors in a way that is not supported.
        """
        if name not in self._parts:
            return None
        self._claimed.add(name)
        parts, converter = self._parts[name], self._converters[name]
        if converter is None:
            ((first, *others),) = parts.values()
            if others:
                raise CheckpointError(f"tensors {first} and {', '.join(others)} are both parameter {name}")
            return self._sources[first]
        columns = [[self._apart(part) for part in parts[pattern]] for pattern in converter.source_patterns]
        steps = [(type(step), getattr(step, "dim", None)) for step in converter.operations]
        if steps == [(Concatenate, 0)] and all(len(column) == 1 for column in columns):
            return Joined(tuple(column[0] for column in columns))
        if steps in ([(MergeModulelist, 0)], [(MergeModulelist, 0), (Concatenate, 1)]):
            rows = list(zip(*columns, strict=True))
            return ExpertSources(tuple(row[0] if len(row) == 1 else Joined(row) for row in rows))
        operations = ", ".join(type(step).__name__ for step in converter.operations)
        raise CheckpointError(f"parameter {name}: its tensors are put together by {operations}, which is not supported")

    def _apart(self, name: str) -> TensorSource:
        """A value that transformers would combine with others. Raises CheckpointError for a stack of experts."""
        source = self._sources[name]
        if isinstance(source, ExpertSources):
            raise CheckpointError(f"tensor {source.places[0].name}: packed experts must be stored as the parameter is")
        return source

    def unclaimed(self) -> Iterable[str]:
        """Names of values in the checkpoint that no parameter has claimed."""
        return (name for name in self._parts if name not in self._claimed)
