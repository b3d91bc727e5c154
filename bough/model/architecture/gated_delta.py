"""Gated delta nets (arXiv 2412.06464), the recurrent layers of Qwen3-Next and Qwen3.5, on the paths of trees.

A row's step of the recurrence is computed from its parent's state alone, with the same arithmetic in any batch. Prompts
take the same steps one after another, as the chunked form rounds differently.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.functional import pad, silu, softplus

from bough.model.backend import backend_of
from bough.model.batch.batch import BatchPart, Chunk
from bough.model.batch.state_steps import COMMITTED, StateSteps
from bough.model.kv.state_shape import RECURRENT, StateShape
from bough.model.kv.states import UNUSABLE, LayerState, StateRows

MODEL_TYPES = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")  # whose recurrent layers are of this kind
ROW_STEP = 4  # the convolution's rows are padded to multiples, as torch must split them into whole vectors
CHANNEL_STEP = 16  # the number of channels must be a multiple of this, for the same reason


def run_trees(model: nn.Module) -> None:
    """Make a model's recurrent layers run on trees, each with its index among the layers of its kind in a slot."""
    config: Any = model.config
    if StateShape.of(config, torch.float32) is None:
        return
    num_others = 0
    for index, layer in enumerate(model.get_decoder().layers):  # type: ignore[operator]
        is_recurrent = config.layer_types[index] == RECURRENT
        module = layer.linear_attn if is_recurrent else layer.self_attn
        module.layer_idx = index - num_others if is_recurrent else num_others
        num_others += not is_recurrent
        if is_recurrent:
            module.forward = partial(_forward, module)


def why_not_recurrent(config: Any) -> str:
    """Why a configuration's recurrent layers cannot run; empty if they can."""
    shape = StateShape.of(config, torch.float32)
    if config.model_type not in MODEL_TYPES or shape is None:
        return f"layers of {RECURRENT} keep a state, which is supported on trees only in {', '.join(MODEL_TYPES)}"
    if shape.num_layers == config.num_hidden_layers:
        return "all of its layers keep a state, and none has attention"
    if shape.num_heads % shape.num_key_heads:
        return (
            f"linear_num_value_heads must be a multiple of linear_num_key_heads, {shape.num_key_heads}, "
            f"got {shape.num_heads}"
        )
    if config.hidden_act != "silu":
        return f"the activation of recurrent layers must be 'silu', got {config.hidden_act!r}"
    if shape.num_inputs % CHANNEL_STEP:
        return f"the convolution must have a multiple of {CHANNEL_STEP} channels, got {shape.num_inputs}"
    return ""


def _forward(module: Any, hidden_states: torch.Tensor, chunk: Chunk, **_unused: Any) -> torch.Tensor:
    """Replaces the module's forward: (1, num_rows, hidden) in and out."""
    inputs, gate, beta, decay = _projected(module, hidden_states)
    rows = StateRows(inputs, decay, beta)
    out = torch.zeros_like(gate)
    for piece in chunk.pieces:
        states = piece.slot.states
        assert states is not None, "slots of recurrent models have states"
        state = states.layer(module.layer_idx, out.device)
        own = rows.select(piece.span)
        if piece.is_tree:
            out[piece.span] = _along_tree(module, state, piece, own)
        else:
            out[piece.span] = _along_text(module, state, piece, own, sorted(states.wanted))
    normed = module.norm(out.reshape(-1, module.head_v_dim), gate.reshape(-1, module.head_v_dim))
    result: torch.Tensor = module.out_proj(normed.reshape(1, len(out), -1))
    return result


def _projected(module: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Projections of all rows: inputs of the convolution, the output's gate, beta, and the factor of the state."""
    if hasattr(module, "in_proj_qkvz"):  # in the order of key heads
        mixed = module.fix_query_key_value_ordering(module.in_proj_qkvz(hidden), module.in_proj_ba(hidden))
        queries, keys, values, gate, beta, rate = (numbers[0] for numbers in mixed)
        inputs = torch.cat([numbers.flatten(1) for numbers in (queries, keys, values)], dim=-1)
    else:
        inputs, gate, beta, rate = (
            linear(hidden)[0] for linear in (module.in_proj_qkv, module.in_proj_z, module.in_proj_b, module.in_proj_a)
        )
        gate = gate.unflatten(-1, (-1, module.head_v_dim))
    decay = torch.exp(-module.A_log.float().exp() * softplus(rate.float() + module.dt_bias))
    return inputs, gate, beta.sigmoid().float(), decay


def _along_text(
    module: Any, state: LayerState, piece: BatchPart, rows: StateRows, snapshots: list[int]
) -> torch.Tensor:
    """Outputs of rows of the text, which are a piece; the state is then after the last of them."""
    outs, done, num_rows, begin = [], 0, len(rows.decay), int(piece.lengths[0]) - 1
    for end in sorted({*(at - begin for at in snapshots if begin < at <= begin + num_rows), num_rows}):
        outs.append(_advance(module, state, piece, begin + done, rows.select(slice(done, end))))
        done = end
        if state.length in snapshots:
            state.snap()
    return torch.cat(outs)


def _advance(module: Any, state: LayerState, piece: BatchPart, begin: int, rows: StateRows) -> torch.Tensor:
    """Advance the state over rows kept of accepted tokens up to position `begin`, and then over these of a piece."""
    num_kept, length = begin - state.length, begin + len(rows.decay)
    rows = state.kept.select(slice(num_kept)).followed_by(rows)
    steps = piece.chain_steps(len(rows.decay), len(state.window))
    state.length = UNUSABLE  # if this fails midway
    out = _run(module, state, rows, steps, len(rows.decay) - num_kept)
    state.window = torch.cat((state.window, rows.inputs))[
        len(rows.decay) :
    ].clone()  # a copy, without the other rows' memory
    state.length, state.kept = length, state.no_rows()
    return out


def _along_tree(module: Any, state: LayerState, piece: BatchPart, rows: StateRows) -> torch.Tensor:
    """Outputs of a tree's rows, which are kept; the state advances to the tree's root only."""
    if state.length < piece.base:
        nodes = state.kept.select(slice(piece.base - state.length, None))
        _advance(module, state, piece, piece.base, rows.select(slice(0, 0)))
        state.kept = nodes
    num_before = int(piece.rows[0]) - piece.base  # nodes of an earlier chunk of the same sweep, or of a draft's steps
    state.kept = state.kept.select(slice(num_before)).followed_by(rows)
    return _run(module, state, state.kept, piece.tree_steps(len(state.window)), len(rows.decay))


def _run(module: Any, state: LayerState, rows: StateRows, steps: StateSteps, num_new: int) -> torch.Tensor:
    """Outputs (num_new, num_heads, value_dim) of the last rows."""
    there = steps.on(rows.inputs.device)
    qkv = _convolved(module, torch.cat((state.window, rows.inputs)), there.windows)
    states = state.memory[:, None]
    if steps.num_places > 1:
        states = state.memory.new_empty(len(state.memory), steps.num_places, *state.memory.shape[1:])
        states[:, COMMITTED] = state.memory
    decay, beta, begin = rows.decay[there.rows], rows.beta[there.rows], len(steps.rows) - num_new
    out = backend_of(qkv.device).recur(qkv, decay, beta, steps, states, module.num_k_heads, begin)
    return out.to(rows.inputs.dtype)


def _convolved(module: Any, inputs: torch.Tensor, windows: torch.Tensor) -> torch.Tensor:
    """The convolution at each window, and its activation: (num_windows, num_inputs) float32."""
    weights = module.conv1d.weight[:, 0].float().t()
    windows = pad(windows, (0, 0, 0, -len(windows) % ROW_STEP))
    products = inputs[windows].float().mul_(weights)
    total = products[:, 0]
    for place in range(1, len(weights)):
        total = total + products[:, place]
    return silu(total.to(inputs.dtype)).float()
