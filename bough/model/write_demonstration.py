"""The demonstration target: SmolLM2-135M-Instruct, block-expanded to a size that must be streamed.

Block expansion (LLaMA Pro, arXiv 2401.02415): copies of a block whose `o_proj` and `down_proj` are zero are read and
computed in full but change nothing. So the text is the original model's, at the cost of a model ten times its size.

`python -m bough.model.write_demonstration FOLDER [COPIES]` writes it, unless it exists.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from bough.config.cache_paths import EXPANSION_NAME, is_written, make_space, original_file
from bough.errors import BoughError
from bough.model.checkpoint.atomic_files import replace
from bough.model.checkpoint.safetensors_folder import INDEX_NAME
from bough.tokenization.demonstration_template import write_template

ZEROED = ("self_attn.o_proj.weight", "mlp.down_proj.weight")


def write_demonstration(folder: Path, copies: int) -> None:
    """Write the model atomically, with `copies` identity copies after every block.

    Raises:
        ConfigError: the package with the weights is missing, or the disk is too full.
    """
    if is_written(folder, copies):
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    make_space(folder, copies)
    model, tokenizer = _load_original()
    partial = folder.with_name(f"{folder.name}.partial-{os.getpid()}")
    try:
        partial.mkdir()
        tokenizer.save_pretrained(partial)
        write_template(partial)
        model.generation_config.save_pretrained(partial)
        _write_weights(model, partial, copies, _expanded_bytes(model, copies))
        _write_config(model, partial, copies)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    if folder.exists():
        shutil.rmtree(folder)
    partial.rename(folder)


def _load_original() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    gguf = original_file()
    package = gguf.parent
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(package, gguf_file=gguf.name)
    # Without dequantize=True transformers keeps a GGUF quantizer on the model, and saving raises.
    model = AutoModelForCausalLM.from_pretrained(
        package, gguf_file=gguf.name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    return model, tokenizer


def _expanded_bytes(model: PreTrainedModel, copies: int) -> int:
    in_layers: int = sum(p.numel() * p.itemsize for p in model.model.layers.parameters())
    return copies * in_layers + sum(p.numel() * p.itemsize for p in model.parameters())


def _write_weights(model: PreTrainedModel, folder: Path, copies: int, num_bytes: int) -> None:
    """Write one file for each original block with its copies, and one for everything else."""
    weight_map: dict[str, str] = {}
    name = folder.name.split(".partial")[0]
    with tqdm(total=num_bytes, unit="B", unit_scale=True, desc=name, disable=None) as progress:  # on terminals only

        def write(name: str, tensors: dict[str, torch.Tensor]) -> None:
            content = f"{len(tensors)} tensors of the demonstration"
            replace(folder / name, lambda partial: save_file(tensors, partial, metadata={"format": "pt"}), content)
            weight_map.update(dict.fromkeys(tensors, name))
            progress.update(sum(t.numel() * t.itemsize for t in tensors.values()))

        for index, layer in enumerate(model.model.layers):
            write(f"block-{index:03d}.safetensors", _expanded_block(layer, index * (copies + 1), copies))
        outside = {name: t for name, t in model.state_dict().items() if ".layers." not in name}
        if model.config.tie_word_embeddings:
            outside.pop("lm_head.weight", None)
        write("outside-blocks.safetensors", outside)
    (folder / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}, indent=1))


def _expanded_block(layer: torch.nn.Module, first: int, copies: int) -> dict[str, torch.Tensor]:
    tensors = {f"model.layers.{first}.{name}": tensor for name, tensor in layer.state_dict().items()}
    for copy in range(1, copies + 1):
        for name, tensor in layer.state_dict().items():
            value = torch.zeros_like(tensor) if name in ZEROED else tensor.clone()
            tensors[f"model.layers.{first + copy}.{name}"] = value
    return tensors


def _write_config(model: PreTrainedModel, folder: Path, copies: int) -> None:
    """Write the configuration, then the manifest, without which the model is incomplete."""
    num_original = model.config.num_hidden_layers
    model.config.num_hidden_layers = num_original * (copies + 1)
    model.config.save_pretrained(folder)
    manifest = {"working_layers": [index * (copies + 1) for index in range(num_original)], "copies": copies}
    (folder / EXPANSION_NAME).write_text(json.dumps(manifest))


if __name__ == "__main__":
    try:
        write_demonstration(Path(sys.argv[1]), int(sys.argv[2]))
    except BoughError as exc:
        raise SystemExit(f"error: {exc}") from exc
    except KeyboardInterrupt:  # a terminal's Ctrl-C, of which `bough up` tells
        raise SystemExit(130) from None
