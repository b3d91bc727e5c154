"""Weights in the formats of published checkpoints, packed element by element, and the values that they stand for.

Nothing here is bough's own: layouts are as the libraries compressed-tensors and transformers document them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

GROUP, BLOCK = 32, (40, 48)  # blocks of which the last ones are cut off


class Stored(NamedTuple):
    """A matrix."""

    tensors: dict[str, torch.Tensor]  # by what follows the module's name
    value: torch.Tensor  # (outputs, inputs) float32


Store = Callable[[int, int, np.random.Generator], Stored]


def words(
    bits: int, group: int, symmetric: bool = True, ordered: bool = True, dtype: torch.dtype = torch.bfloat16
) -> Store:
    """Unsigned integers in words along a row, and zero points in words along outputs; a `group` of 0 is a row."""

    def store(outputs: int, inputs: int, rng: np.random.Generator) -> Stored:
        size, per_word = group or inputs, 32 // bits
        groups = np.arange(inputs) // size
        groups = groups if ordered else rng.permutation(groups)
        numbers = rng.integers(0, 2**bits, (outputs, inputs))
        zeros = rng.integers(0, 2**bits, (outputs, inputs // size))
        zeros = np.full_like(zeros, 2 ** (bits - 1)) if symmetric else zeros
        scales = scales_of(rng, (outputs, inputs // size), dtype, 0.3 / 2**bits)
        packed = np.zeros((outputs, inputs // per_word), np.uint32)
        for k in range(inputs):
            packed[:, k // per_word] |= numbers[:, k].astype(np.uint32) << np.uint32(bits * (k % per_word))
        packed_zeros = np.zeros((-(-outputs // per_word), inputs // size), np.uint32)
        for n in range(outputs):
            packed_zeros[n // per_word] |= zeros[n].astype(np.uint32) << np.uint32(bits * (n % per_word))
        tensors = {
            "weight_packed": torch.from_numpy(packed.view(np.int32)),
            "weight_scale": scales,
            "weight_shape": torch.tensor([outputs, inputs]),
        }
        if not symmetric:
            tensors["weight_zero_point"] = torch.from_numpy(packed_zeros.view(np.int32))
        if not ordered:
            tensors["weight_g_idx"] = torch.from_numpy(groups.astype(np.int32))
        value = (numbers - zeros[:, groups]).astype(np.float32) * scales.float().numpy()[:, groups]
        return Stored(tensors, torch.from_numpy(value))

    return store


def bytes_(kind: torch.dtype, scale: str, name: str = "weight_scale", dtype: torch.dtype = torch.float32) -> Store:
    """Numbers in bytes, E4M3 or int8, with one `scale` for all, for each channel, or for each block."""

    def store(outputs: int, inputs: int, rng: np.random.Generator) -> Stored:
        bits = rng.integers(0, 256, (outputs, inputs)).astype(np.uint8)
        if kind == torch.float8_e4m3fn:
            bits[bits & 0x7F == 0x7F] = 0  # no numbers
        numbers = e4m3(bits) if kind == torch.float8_e4m3fn else bits.view(np.int8).astype(np.float32)
        height, width = {"tensor": (outputs, inputs), "channel": (1, inputs), "block": BLOCK}[scale]
        shape = -(-outputs // height), -(-inputs // width)
        scales = scales_of(rng, shape, dtype, 0.3 / (448 if kind == torch.float8_e4m3fn else 128))
        each = scales.float().numpy()[np.arange(outputs)[:, None] // height, np.arange(inputs)[None, :] // width]
        tensors = {"weight": torch.from_numpy(bits).view(kind), name: scales if scale != "tensor" else scales.view(())}
        return Stored(tensors, torch.from_numpy(numbers * each))

    return store


def mxfp4(experts: int, outputs: int, inputs: int, rng: np.random.Generator) -> Stored:
    """Experts of E2M1 numbers, two in a byte, and exponents for 32 inputs; the value is (experts, inputs, outputs)."""
    numbers = rng.integers(0, 16, (experts, outputs, inputs)).astype(np.uint8)
    exponents = rng.integers(120, 124, (experts, outputs, inputs // 32)).astype(np.uint8)
    blocks = (numbers[..., ::2] | numbers[..., 1::2] << 4).reshape(*exponents.shape, 16)
    value = e2m1(numbers) * 2.0 ** (exponents.repeat(32, -1).astype(np.float32) - 127)
    tensors = {"_blocks": torch.from_numpy(blocks), "_scales": torch.from_numpy(exponents)}
    return Stored(tensors, torch.from_numpy(value.astype(np.float32)).transpose(1, 2).contiguous())


def nvfp4(numbers_name: str, whole_name: str) -> Store:
    """E2M1 numbers, two in a byte, E4M3 scales for 16 inputs, and a scale for all, which divides if it is global."""

    def store(outputs: int, inputs: int, rng: np.random.Generator) -> Stored:
        numbers = rng.integers(0, 16, (outputs, inputs)).astype(np.uint8)
        scales = rng.integers(0, 0x7F, (outputs, inputs // 16)).astype(np.uint8)
        divides = "global" in whole_name
        whole = np.array([3777.7 if divides else 0.000237], np.float32)
        each = e4m3(scales) / whole if divides else e4m3(scales) * whole
        tensors = {
            numbers_name: torch.from_numpy(numbers[:, ::2] | numbers[:, 1::2] << 4),
            "weight_scale": torch.from_numpy(scales).view(E4M3),
            whole_name: torch.from_numpy(whole).view((1,) if divides else ()),
        }
        return Stored(tensors, torch.from_numpy(e2m1(numbers) * each.repeat(16, 1)))

    return store


def e2m1(bits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The values of E2M1 numbers, from sign, exponent and fraction."""
    exponent, fraction = (bits >> 1) & 3, (bits & 1) / 2
    magnitude = np.where(exponent > 0, 2.0 ** (exponent.astype(int) - 1) * (1 + fraction), fraction)
    return np.where(bits >> 3, -magnitude, magnitude).astype(np.float32)


def e4m3(bits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The values of E4M3 numbers, from sign, exponent and fraction."""
    exponent, fraction = (bits >> 3) & 15, (bits & 7) / 8
    magnitude = np.where(exponent > 0, 2.0 ** (exponent.astype(int) - 7) * (1 + fraction), 2.0**-6 * fraction)
    return np.where(bits >> 7, -magnitude, magnitude).astype(np.float32)


def scales_of(rng: np.random.Generator, shape: tuple[int, ...], dtype: torch.dtype, largest: float) -> torch.Tensor:
    return torch.from_numpy(rng.uniform(largest / 10, largest, shape)).to(dtype)


def compressed(format_: str, weights: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A `quantization_config` of one group."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    common = {"quant_method": "compressed-tensors", "format": format_, "quantization_status": "compressed"}
    return {**common, "config_groups": {"group_0": group}, "ignore": ["lm_head"], "kv_cache_scheme": None, **more}


INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
FLOAT4 = {"num_bits": 4, "type": "float", "symmetric": True}
MODELOPT = {"quant_method": "modelopt", "ignore": ["lm_head"], "kv_cache_scheme": {"num_bits": 8, "type": "float"}}
E4M3 = torch.float8_e4m3fn
FORMATS: dict[str, tuple[dict[str, Any], Store]] = {
    "W4A16": (compressed("pack-quantized", INT4), words(4, GROUP)),
    "W4A16, asymmetric": (
        compressed("pack-quantized", {**INT4, "symmetric": False}),
        words(4, GROUP, False, dtype=torch.float32),
    ),
    "W4A16, by g_idx": (
        compressed("pack-quantized", {**INT4, "symmetric": False, "actorder": "group"}),
        words(4, GROUP, False, False, torch.float32),
    ),
    "W4A16, channels": (
        compressed("pack-quantized", {"num_bits": 4, "strategy": "channel"}),
        words(4, 0, dtype=torch.float32),
    ),
    "W8A16": (compressed("pack-quantized", {**INT4, "num_bits": 8}), words(8, GROUP, dtype=torch.float16)),
    "W8A16, asymmetric channels": (
        compressed("pack-quantized", {**INT8, "symmetric": False}),
        words(8, 0, symmetric=False),
    ),
    "int8": (compressed("int-quantized", INT8), bytes_(torch.int8, "channel", dtype=torch.bfloat16)),
    "FP8, tensors": (compressed("naive-quantized", {**FLOAT8, "strategy": "tensor"}), bytes_(E4M3, "tensor")),
    "FP8, channels": (compressed("float-quantized", {**FLOAT8, "strategy": "channel"}), bytes_(E4M3, "channel")),
    "FP8, blocks": (
        compressed("float-quantized", {**FLOAT8, "strategy": "block", "block_structure": list(BLOCK)}),
        bytes_(E4M3, "block", dtype=torch.bfloat16),
    ),
    "DeepSeek": ({**FP8, "weight_block_size": list(BLOCK)}, bytes_(E4M3, "block", "weight_scale_inv")),
    "DeepSeek, ue8m0": (
        {**FP8, "weight_block_size": list(BLOCK), "scale_fmt": "ue8m0"},
        bytes_(E4M3, "block", "weight_scale_inv", dtype=torch.float8_e8m0fnu),
    ),
    "NVFP4": (
        compressed("nvfp4-pack-quantized", {**FLOAT4, "strategy": "tensor_group", "group_size": 16}),
        nvfp4("weight_packed", "weight_global_scale"),
    ),
    "ModelOpt": ({**MODELOPT, "quant_algo": "NVFP4"}, nvfp4("weight", "weight_scale_2")),
    "ModelOpt, FP8": ({**MODELOPT, "quant_algo": "FP8"}, bytes_(E4M3, "tensor")),
    "fp8, tensors": (FP8, bytes_(E4M3, "tensor", dtype=torch.bfloat16)),
    "fp8, channels": (FP8, bytes_(E4M3, "channel", "weight_scale_inv")),
}
