"""Writes the layers that tests/model/quant/test_packed.py reads, with packers by which checkpoints are published.

    pip install --no-deps --target LIBS auto-gptq==0.7.1 compressed-tensors==0.20.0 loguru
    pip download --no-deps --no-binary :all: autoawq==0.2.9
    PYTHONPATH=LIBS:AUTOAWQ_SOURCES python tests/data/pack_layers.py [FILE ...]

Each file has a layer's tensors as such a checkpoint has them, and in `weight` what the library itself multiplies by.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import torch
from safetensors.torch import save_file
from torch import nn

HERE, INPUTS, OUTPUTS, GROUP = Path(__file__).parent, 128, 96, 32


def module(name: str) -> ModuleType:
    """A module of a library without the imports of the packages around it, which want much that is not needed."""
    parts = name.split(".")
    for depth in range(1, len(parts)):
        package = ".".join(parts[:depth])
        if package not in sys.modules:
            around = sys.modules[package] = ModuleType(package)
            around.__path__ = [str(Path(path, *parts[:depth])) for path in sys.path]
    return importlib.import_module(name)


def quantised(in_order: bool) -> tuple[nn.Linear, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A matrix on a grid, its scales and zeros (outputs, groups), and the group of each input."""
    generator = torch.Generator().manual_seed(1)
    scales = torch.rand(OUTPUTS, INPUTS // GROUP, generator=generator) / 8 + 0.01
    zeros = torch.randint(1, 15, scales.shape, generator=generator)
    groups = torch.arange(INPUTS) // GROUP
    if not in_order:
        groups = groups[torch.randperm(INPUTS, generator=generator)]
    integers = torch.randint(0, 16, (OUTPUTS, INPUTS), generator=generator)
    linear = nn.Linear(INPUTS, OUTPUTS, bias=False, dtype=torch.float16)
    linear.weight.data = ((integers - zeros[:, groups]) * scales.half()[:, groups]).half()
    return linear, scales.half(), zeros, groups.int()


def by_auto_gptq(file: str, in_order: bool) -> None:
    """What AutoGPTQ's layer multiplies by is what it makes of an identity matrix."""
    linear, scales, zeros, groups = quantised(in_order)
    layer = module("auto_gptq.nn_modules.qlinear.qlinear_cuda").QuantLinear(4, GROUP, INPUTS, OUTPUTS, False)
    layer.pack(linear, scales, zeros.clone(), groups)
    save(file, dict(layer.named_buffers()), layer(torch.eye(INPUTS, dtype=torch.float16)).T)


def by_autoawq(file: str) -> None:
    """What AutoAWQ's layer multiplies by where it has no kernel."""
    linear, scales, zeros, _ = quantised(True)
    layer = module("awq.modules.linear.gemm").WQLinear_GEMM.from_linear(
        linear, 4, GROUP, scales=scales.T.contiguous(), zeros=zeros.T.contiguous()
    )
    tensors = dict(layer.named_buffers())
    unpacked = module("awq.utils.packing_utils").dequantize_gemm(
        tensors["qweight"], tensors["qzeros"], tensors["scales"], 4, GROUP
    )
    save(file, tensors, unpacked.T)


def by_compressed_tensors(file: str, format_: str, scales: torch.Tensor, **weights: object) -> None:
    """What compressed-tensors makes of its own tensors again."""
    library = importlib.import_module("compressed_tensors.quantization")
    compressor = importlib.import_module("compressed_tensors.compressors").BaseCompressor.get_value_from_registry(
        format_
    )
    scheme = library.QuantizationScheme(targets=["Linear"], weights=library.QuantizationArgs(**weights))
    zeros = quantised(True)[2] - 8
    values = {
        "weight": quantised(True)[0].weight.data,
        "weight_scale": scales,
        "weight_zero_point": zeros.to(torch.int8),
    }
    if scheme.weights.symmetric:
        del values["weight_zero_point"]
    tensors = compressor.compress(values, scheme)
    save(file, tensors, compressor.decompress(tensors, scheme)["weight"])


def save(file: str, tensors: dict[str, torch.Tensor], weight: torch.Tensor) -> None:
    """Next to this script."""
    named = {f"layer.{name}": tensor.contiguous() for name, tensor in tensors.items() if tensor is not None}
    save_file({**named, "weight": weight.contiguous()}, HERE / file)


WRITERS = {
    "auto-gptq": lambda file: by_auto_gptq(file, True),
    "auto-gptq-desc-act": lambda file: by_auto_gptq(file, False),
    "autoawq": by_autoawq,
    "compressed-tensors": lambda file: by_compressed_tensors(
        file, "pack-quantized", quantised(True)[1], num_bits=4, symmetric=False, strategy="group", group_size=GROUP
    ),
    "compressed-tensors-fp8": lambda file: by_compressed_tensors(
        file,
        "float-quantized",
        torch.linspace(0.005, 0.01, 4).half().view(2, 2),
        type="float",
        strategy="block",
        block_structure=[64, 64],
    ),
}

if __name__ == "__main__":
    for name in sys.argv[1:] or WRITERS:
        WRITERS[name](f"{name}.safetensors")
