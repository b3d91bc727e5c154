"""Writes the demonstration model as a mixture of experts that says the same: real weights for what needs experts.

    python -m loadtest.mixture FOLDER --experts 4

Each MLP is divided into experts by its inner neurons, of which every row chooses all, alike (Mixtral's build; compare
arXiv 2110.01786, which chooses some). An expert's output is scaled by their number, which the router's equal weights
take away again: with a power of two no bit of a weight is lost. So its size is SmolLM2's, and what it says is the same
but for rounding.
`bough up --target FOLDER --drop-layers 3,14` serves it.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from bough.cli.up import ensure_demonstration
from bough.config.cache_paths import demonstration_folder

MATRICES = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}  # of an MLP, as an expert has them
KEPT = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"
POWERS = 2, 4, 8, 16, 32


def in_experts(name: str, tensor: torch.Tensor, count: int) -> Iterator[tuple[str, torch.Tensor]]:
    """A tensor of the dense model, or what becomes of it."""
    layer, is_of_mlp, rest = name.partition(".mlp.")
    if not is_of_mlp:
        yield name, tensor
        return
    kind = rest.removesuffix(".weight")
    is_down = kind == "down_proj"
    for expert, part in enumerate(tensor.chunk(count, dim=1 if is_down else 0)):
        value = part * count if is_down else part
        yield f"{layer}.block_sparse_moe.experts.{expert}.{MATRICES[kind]}.weight", value.contiguous()
    if is_down:
        yield f"{layer}.block_sparse_moe.gate.weight", torch.zeros(count, tensor.shape[0], dtype=tensor.dtype)


def write_mixture(source: Path, folder: Path, count: int) -> None:
    """Of a Llama without biases, whose inner neurons a power of two divides; the folder is made."""
    config = json.loads((source / "config.json").read_text())
    assert config["intermediate_size"] % count == 0, "experts are alike"
    folder.mkdir(parents=True)
    for file in source.glob("*.safetensors"):
        parts = {n: v for name, tensor in load_file(file).items() for n, v in in_experts(name, tensor, count)}
        save_file(parts, folder / file.name, metadata={"format": "pt"})
    weight_map: dict[str, str] = {}
    for file in folder.glob("*.safetensors"):
        weight_map |= dict.fromkeys(load_file(file), file.name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    for name in KEPT:
        if (source / name).exists():
            shutil.copy(source / name, folder / name)
    config |= {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "intermediate_size": config["intermediate_size"] // count,
        "num_local_experts": count,
        "num_experts_per_tok": count,
        "sliding_window": None,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def main() -> None:
    """Writes and says where."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="that is not there yet")
    parser.add_argument("--experts", type=int, choices=POWERS, default=4)
    arguments = parser.parse_args()
    if arguments.folder.exists():
        parser.error(f"folder: {arguments.folder} is there already; another one would do")
    ensure_demonstration(0)
    write_mixture(demonstration_folder(0), arguments.folder, arguments.experts)
    print(json.dumps({"folder": str(arguments.folder), "experts": arguments.experts}))


if __name__ == "__main__":
    main()
