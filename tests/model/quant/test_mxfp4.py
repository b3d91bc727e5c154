"""gpt-oss as it is published, with experts in MXFP4: what transformers reads, expert by expert and in 4 bits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, Mxfp4Config
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from bough.client import Client
from bough.errors import CheckpointError
from bough.model.architecture.moe import ExpertSources
from bough.model.batch.batch import Batch, Segment
from bough.model.checkpoint.checkpoint import Checkpoint
from bough.model.checkpoint.safetensors_folder import read_header
from bough.model.checkpoint.tensor_source import FreshMemory
from bough.model.loading.loading import build_skeleton, logical_sources
from bough.model.quant.mxfp4 import Mxfp4Format
from bough.model.running.runner import ResidentModel
from bough.protocol.generation import Finished, GenerateOptions, Speculation, TokenPrompt, Tokens
from bough.trees.tree import Tree
from draft_worker.model.sources import kept_layers
from loadtest.common.tiny_model import save_model
from tests.fakes.gpu.device_sweeps import Where, on_cpu, on_device, require_close, three_sweeps
from tests.fakes.model.families import FAMILIES
from tests.fakes.model.packed_files import raw_parts, require_same_sizes, rewrite, tensors_of
from tests.fakes.model.published_formats import mxfp4
from tests.fakes.models import CPU, new_slot, plan_of, streamed
from tests.fakes.stack import stack

PROMPT, NAME = list(range(20, 44)), "gpt-oss, sinks, alternating windows"
# Of two layers, with either window.
GPT_OSS = type(FAMILIES[NAME])(**{**FAMILIES[NAME].to_dict(), "num_hidden_layers": 2, "layer_types": None})
AS_PUBLISHED: dict[str, object] = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}


def published(folder: Path, seed: int = 5) -> tuple[Path, Path]:
    """A small gpt-oss as OpenAI publishes it, and the same model written out."""
    source, rng = save_model(folder / "model", GPT_OSS), np.random.default_rng(seed)
    packed = plain = tensors_of(source)
    for name in [name for name in plain if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inputs, outputs = plain[name].shape
        stored = mxfp4(experts, outputs, inputs, rng)
        packed = {key: tensor for key, tensor in packed.items() if key != name}
        packed |= {name + ending: tensor for ending, tensor in stored.tensors.items()}
        plain = plain | {name: stored.value}
    return rewrite(source, folder / "packed", packed, AS_PUBLISHED), rewrite(source, folder / "plain", plain, None)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return published(tmp_path_factory.mktemp("gpt-oss"))


def opened(blocks: torch.Tensor, scales: torch.Tensor, folder: Path) -> ExpertSources:
    save_file({"x_blocks": blocks, "x_scales": scales}, folder / "model.safetensors")
    checkpoint = Checkpoint(folder, read_header(folder / "model.safetensors"))
    source = logical_sources(checkpoint, Mxfp4Format.of(AS_PUBLISHED, ""))["x"]
    assert isinstance(source, ExpertSources)
    return source


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
def test_every_number_with_every_exponent_equals_transformers(dtype: torch.dtype, tmp_path: Path) -> None:
    numbers = torch.arange(256, dtype=torch.uint8).view(16, 16)
    blocks = numbers[None, None].expand(2, 255, 16, 16).contiguous()
    scales = torch.arange(255, dtype=torch.uint8)[None, :, None].expand(2, 255, 16).contiguous()
    source = opened(blocks, scales, tmp_path)
    found = [part.value(raw_parts(part), dtype, FreshMemory(CPU)) for part in source.parts]
    wanted = convert_moe_packed_tensors(blocks, scales, dtype=dtype)
    assert source.shape == tuple(wanted.shape) == (2, 512, 255)
    for mine, theirs in zip(found, wanted, strict=True):
        assert torch.equal(mine.contiguous().view(torch.uint8), theirs.contiguous().view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_bits_do_not_depend_on_the_place_of_experts(dtype: torch.dtype, both: tuple[Path, Path]) -> None:
    """Read when rows choose them, with their layers, and kept in memory; in float32 those of the model written out."""
    packed, plain = both
    wanted = on_cpu(packed, dtype)
    for options in ({"expert_slabs": 4}, {"max_resident": 2}):
        with streamed(packed, dtype, **options) as model:
            assert torch.equal(three_sweeps(model, CPU).float(), wanted)
    if dtype == torch.float32:
        assert torch.equal(on_cpu(plain, dtype), wanted)


def test_an_expert_streams_in_4_bits(both: tuple[Path, Path]) -> None:
    weights = 3 * GPT_OSS.hidden_size * GPT_OSS.intermediate_size
    for layer in plan_of(both[0]).values():
        places = [place for slot in layer.each[1].slots for place in slot.source.places]
        assert sum(place.num_bytes for place in places) == weights * (4 + 8 / 32) / 8


def test_a_devices_kernel_unpacks_experts(both: tuple[Path, Path]) -> None:
    """Alone, as they are chosen, or all together."""
    wanted = on_cpu(both[0], torch.float32)
    for where in (Where(expert_slabs=4), Where(max_resident=2)):
        require_close(on_device(both[0], where, torch.float32), wanted)


@pytest.fixture(scope="module")
def said(both: tuple[Path, Path]) -> list[int]:
    """What transformers' model says after PROMPT."""
    reference = AutoModelForCausalLM.from_pretrained(
        both[0], dtype=torch.float32, quantization_config=Mxfp4Config(dequantize=True)
    )
    prompt = torch.tensor([PROMPT])
    output = reference.generate(prompt, max_new_tokens=9, do_sample=False, eos_token_id=None, pad_token_id=0)
    tokens: list[int] = output[0, len(PROMPT) :].tolist()
    return tokens


def test_a_tree_is_accepted_along_transformers_output(both: tuple[Path, Path], said: list[int]) -> None:
    tokens, parents = [PROMPT[-1]], [-1]
    for token in said[:-1]:
        parents += [max(0, len(tokens) - 1)] * 2
        tokens += [(token + 1) % 256, token]
    tree = Tree.of(tokens, parents, [0.0] * len(tokens))
    with streamed(both[0], torch.float32, expert_slabs=4) as model:
        slot = new_slot(model)
        context = Segment.context(slot, 0, PROMPT[:-1])
        logits = model.sweep(Batch([context, Segment.tree(slot, len(PROMPT) - 1, tree)], model.rows, CPU))[0]
    assert [int(logits[node].argmax()) for node in tree.path(len(tokens) - 1)] == said


async def test_a_target_and_its_draft_give_plain_decoding_and_transformers_output(
    both: tuple[Path, Path], said: list[int], tmp_path: Path
) -> None:
    draft = published(tmp_path, seed=6)[0]
    options = GenerateOptions(max_tokens=len(said), temperature=0.0, ignore_eos=True)
    async with stack(tmp_path, model=both[0], draft_model=draft) as running:
        assert any("experts are loaded when rows choose them" in note for note in running.target.info().notes)
        async with Client(running.addresses["orchestrator"]) as client:
            for disabled in (False, True):
                how = replace(options, speculation=Speculation(disabled=disabled))
                events = [event async for event in client.generate(TokenPrompt(tuple(PROMPT)), how)]
                assert [token for event in events if isinstance(event, Tokens) for token in event.token_ids] == said
                (end,) = (event for event in events if isinstance(event, Finished))
                assert (end.speculation.num_draft_tokens == 0) is disabled


def test_a_draft_with_dropped_layers_packed_or_unpacked(both: tuple[Path, Path]) -> None:
    """A substitute of one layer, whose packed experts share one buffer."""
    checkpoint = Checkpoint.open(both[0])
    kept, logits = kept_layers(checkpoint, (1,)), []
    for stays_packed in (False, True):
        draft = ResidentModel(build_skeleton(checkpoint, torch.bfloat16, kept), CPU, stays_packed=stays_packed)
        draft.warm_up(draft.skeleton.kv_shape().empty(8, CPU))
        slot = new_slot(draft)  # it has the same skeleton
        logits.append(
            draft.logits(Batch([Segment.tree(slot, 0, Tree.of([5, 6, 7], [-1, 0, 0], [0.0] * 3))], None, CPU))
        )
    assert torch.equal(*logits)


def test_a_plan_uses_the_files_sizes(both: tuple[Path, Path]) -> None:
    require_same_sizes(both[0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b, s: (b, s[:, :1]), r"x_scales must have shape \[2, 3, 2\], got \[2, 1, 2\]"),
        (lambda b, s: (b, s.float()), r"x_scales must be U8, got F32"),
        (lambda b, s: (b.flatten(2), s), r"x_blocks must have the shape of experts, .* bytes, got \[2, 3, 32\]"),
        (lambda b, s: (b.view(torch.int8), s), r"x_blocks must be U8, got I8"),
    ],
)
def test_tensors_of_wrong_shapes_are_named(
    change: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]], message: str, tmp_path: Path
) -> None:
    blocks, scales = torch.zeros(2, 3, 2, 16, dtype=torch.uint8), torch.zeros(2, 3, 2, dtype=torch.uint8)
    with pytest.raises(CheckpointError, match=message):
        opened(*(tensor.contiguous() for tensor in change(blocks, scales)), tmp_path)


def test_experts_that_do_not_match_config_json_are_named(both: tuple[Path, Path], tmp_path: Path) -> None:
    tensors = tensors_of(both[0])
    for ending in ("_blocks", "_scales"):
        name = f"model.layers.1.mlp.experts.down_proj{ending}"
        tensors[name] = tensors[name][:, :32]
    folder = rewrite(both[0], tmp_path / "cut", tensors, AS_PUBLISHED)
    with pytest.raises(CheckpointError, match=r"down_proj_blocks\[0\] must have the configuration's shape .*, got"):
        build_skeleton(Checkpoint.open(folder), torch.float32)
