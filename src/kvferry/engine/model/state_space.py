"""The state-space (Mamba2) layers of one tensor-parallel rank.

    layer input -> gate, x, B, C, time step
    x, B, C -> convolution with the tokens just before -> SiLU
    state = state * exp(decay * step) + step * x B        one matrix per head
    result = norm((state C + skip * x) * SiLU(gate))      before the output projection

The values that later tokens read (the last inputs of the convolution and the states) are float32
after every token, whatever format the arithmetic has. So if the arithmetic is float64, a token's
result is the same whether the tokens before it were computed in this step, in an earlier step or by
another engine.

Pure, except that `mix` reads and writes the cache.
"""

import torch
from torch.nn.functional import silu, softplus

from kvferry.engine.cache.layout import STATE_DTYPE, StateCache
from kvferry.engine.model.config import StateShape
from kvferry.engine.model.flat_batch import StateBatch, StateRun
from kvferry.engine.model.tensor_parallel import TensorParallelGroup
from kvferry.engine.model.weights import StateWeights


def mix(
    weights: StateWeights,
    shape: StateShape,
    inputs: torch.Tensor,
    cache: StateCache,
    batch: StateBatch,
    group: TensorParallelGroup,
    norm_eps: float,
) -> torch.Tensor:
    """Return the input of the output projection, [rows, this rank's columns], in a wide format.

    Replaces the state of each sequence by the state after the last row of the sequence.
    """
    num_heads = len(weights.decay)
    gate, columns, steps = (
        weights.project(inputs)
        .to(weights.norm.dtype)
        .split((weights.columns[0], sum(weights.columns), num_heads), dim=-1)
    )
    steps = softplus(steps + weights.step_bias)
    result = gate.new_empty((len(inputs), num_heads, shape.head_dim))
    for run in batch.runs:
        convolved = silu(_convolve(weights, columns[run.rows], cache, run))
        x, b, c = convolved.split(weights.columns, dim=-1)
        heads = x.unflatten(-1, (num_heads, shape.head_dim))
        b, c = (_by_head(each, shape, num_heads) for each in (b, c))
        found = _advance_states(weights, cache, run, heads, b, c, steps[run.rows])
        result[run.rows] = found + weights.skip[:, None] * heads
    gated = result.flatten(1) * silu(gate)
    squares = group.sum(gated.square().sum(-1, keepdim=True))
    normed: torch.Tensor = gated * torch.rsqrt(squares / shape.width + norm_eps) * weights.norm
    return normed


def _by_head(values: torch.Tensor, shape: StateShape, num_heads: int) -> torch.Tensor:
    """Return B or C of each head, [..., heads, state_size]; the heads of a group share them."""
    groups: torch.Tensor = values.unflatten(-1, (-1, shape.state_size))
    return groups.repeat_interleave(num_heads // groups.shape[-2], dim=-2)


def _convolve(
    weights: StateWeights, columns: torch.Tensor, cache: StateCache, run: StateRun
) -> torch.Tensor:
    """Return each row's convolution with the rows before it.

    `columns` is [sequences, rows, columns], and so is the result. Saves the last inputs for the
    rows of the next step.
    """
    kernel = weights.conv.shape[1]
    saved = cache.read_conv(run.blocks)
    saved[run.is_new] = 0
    inputs = torch.cat((saved, columns.transpose(1, 2).to(STATE_DTYPE)), dim=-1)
    cache.write_conv(run.blocks, inputs[..., 1 - kernel :])
    windows = inputs.to(columns.dtype).unfold(-1, kernel, 1)
    convolved = torch.einsum("scrk,ck->src", windows, weights.conv.to(columns.dtype))
    return convolved if weights.conv_bias is None else convolved + weights.conv_bias


def _advance_states(
    weights: StateWeights,
    cache: StateCache,
    run: StateRun,
    heads: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    steps: torch.Tensor,
) -> torch.Tensor:
    """Return what each row reads from its state, [sequences, rows, heads, head_dim]."""
    fading = (steps * weights.decay).exp()[..., None, None]
    added = (steps[..., None] * heads)[..., None]
    states = cache.recurrent[run.blocks]
    states[run.is_new] = 0
    found = torch.empty_like(heads)
    for row in range(heads.shape[1]):
        wide = states * fading[:, row] + added[:, row] * b[:, row, :, None]
        states = wide.to(STATE_DTYPE)
        found[:, row] = (states * c[:, row, :, None]).sum(-1)
    cache.recurrent[run.blocks] = states
    return found
