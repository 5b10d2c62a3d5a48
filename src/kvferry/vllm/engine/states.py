"""The states of hybrid models in vLLM: how state tensors are divided into parts and heads, and what
a prefill leg must compute so that a decode side can continue from its states. Pure, except that
`shorten_prefill_leg` changes vLLM's request.

vLLM keeps the state of a state-space or linear-attention layer in two tensors per layer: the last
inputs of a convolution, and a recurrent state. The columns of the convolution are the outputs of
several projections, one behind the other, and each TP rank holds a share of each projection:

    rank 0 of 2    | x0 x1 | B0 | C0 |        a decode side with TP 1 reads x0 x1 from rank 0 and
    rank 1 of 2    | x2 x3 | B1 | C1 |        x2 x3 from rank 1, then B and C

So every projection is a part of its own, with its own number of heads.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum as StateKind
from vllm.v1.kv_cache_interface import MambaSpec, UniformTypeKVCacheSpecs

import vllm
from kvferry.connectors.contract import KVCacheGroup, KVTensor, StateLayout
from kvferry.errors import ConfigError
from kvferry.vllm.release import release

UNSERVED_RELEASES = ("0.31",)
"""In random tests with 0.31, a decode side that had failed loads and few blocks stopped scheduling.
"""
CACHE_MODES = ("none", "align")
"""In these modes, the block of the last computed token holds the state."""
_GROUP_COUNTS = ("mamba_n_groups", "n_groups", "mamba_ngroups")
"""The names under which models state how many groups of B and C they have."""


@dataclass(frozen=True, slots=True)
class StatePart:
    """A part of a layer's state that is divided over TP ranks by itself."""

    name: str
    tensor_index: int
    """The number of the tensor among the layer's state tensors."""
    index: tuple[Any, ...]
    """The part's place in the tensor, behind the dimension of blocks."""
    heads: int
    """The number of heads over all ranks."""


def layer_specs(group: Any) -> dict[str, Any]:
    """The specification of each layer of a group. If the layers differ in size, the group's
    specification wraps one specification per layer.
    """
    spec = group.kv_cache_spec
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return dict(spec.kv_cache_specs)
    return dict.fromkeys(group.layer_names, spec)


def state_specs(*groups: Any) -> dict[str, MambaSpec]:
    """The specification of each layer that keeps states."""
    return {
        layer: spec
        for group in groups
        for layer, spec in layer_specs(group).items()
        if isinstance(spec, MambaSpec)
    }


def attention_specs(groups: Sequence[Any]) -> list[Any]:
    """The specifications of the layers with attention."""
    attending = [group for group in groups if not state_specs(group)]
    return [spec for group in attending for spec in layer_specs(group).values()]


def check_states(model: str, spec: MambaSpec) -> None:
    """Raise `ConfigError` for states that kvferry cannot transfer."""
    if release(vllm.__version__) in UNSERVED_RELEASES:
        raise ConfigError(
            f"{model} has state-space or linear-attention layers, whose states kvferry transfers "
            f"with vLLM 0.32 or later only; this is vLLM {vllm.__version__}"
        )
    if spec.mamba_cache_mode not in CACHE_MODES:
        raise ConfigError(
            f"{model} keeps its states in the cache mode {spec.mamba_cache_mode!r}; start vLLM "
            "with --mamba-cache-mode align"
        )
    if spec.num_speculative_blocks:
        raise ConfigError(
            f"{model} has state-space or linear-attention layers, whose states kvferry does not "
            "transfer with speculative decoding yet; start vLLM without --speculative-config"
        )
    if len(spec.shapes) > 2:
        raise ConfigError(
            f"{model} keeps {len(spec.shapes)} tensors per state; kvferry transfers a convolution "
            "and a recurrent state, so start vLLM without a replay buffer (replayssm)"
        )


def state_group(specs: Mapping[str, MambaSpec], tp_size: int, config: Any) -> KVCacheGroup:
    """The contract's view of a group of layers that keep states."""
    heads = {
        f"{layer}.{part.name}": part.heads
        for layer, spec in specs.items()
        for part in _parts(spec, tp_size, config)
    }
    (block_size,) = {spec.block_size for spec in specs.values()}
    return KVCacheGroup(tuple(heads), state=StateLayout(block_size, heads))


def state_views(
    kv_caches: Mapping[str, Any], specs: Mapping[str, MambaSpec], tp_size: int, config: Any
) -> dict[str, KVTensor]:
    """A view of each part of each layer's state, under the names of `state_group`."""
    views = {}
    for layer, spec in specs.items():
        tensors = _tensors(kv_caches[layer], spec)
        for part in _parts(spec, tp_size, config):
            views[f"{layer}.{part.name}"] = tensors[part.tensor_index][:, *part.index]
    return views


def _tensors(pages: Any, spec: MambaSpec) -> list[Any]:
    """The state tensors of a layer, which lie one behind the other in each of the layer's pages."""
    found, first = [], 0
    for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True):
        size = prod(shape) * dtype.itemsize
        found.append(pages[:, 0, 0, first : first + size].view(dtype).unflatten(1, shape))
        first += size
    return found


def _parts(spec: MambaSpec, tp_size: int, config: Any) -> list[StatePart]:
    columns = _columns(spec, tp_size, config)
    if columns is None or spec.tp_replicated:
        # How the ranks divide this state is not known, so each rank's share counts as one head:
        # then only engines with equal TP sizes have equal numbers of heads.
        heads = 1 if spec.tp_replicated else tp_size
        return [StatePart(f"state{i}", i, (), heads) for i in range(len(spec.shapes))]
    recurrent = spec.shapes[1]
    parts = [StatePart("recurrent", 1, (), recurrent[0] * tp_size)]
    first = 0
    for name, (width, heads) in columns.items():
        chosen = slice(first, first + width)
        first += width
        if is_conv_state_dim_first():
            parts.append(StatePart(f"conv.{name}", 0, (chosen,), heads))
        else:
            # The rows of the convolution hold all projections, so a projection's columns are not
            # contiguous: each row is a part.
            parts += [
                StatePart(f"conv.{name}.{row}", 0, (row, chosen), heads)
                for row in range(spec.shapes[0][0])
            ]
    return parts


def _columns(spec: MambaSpec, tp_size: int, config: Any) -> dict[str, tuple[int, int]] | None:
    """The columns of the convolution by projection, as (width on this rank, heads over all ranks);
    None for kinds of states whose convolution is not understood.
    """
    if len(spec.shapes) != 2 or len(spec.shapes[0]) != 2:
        return None
    width = spec.shapes[0][0 if is_conv_state_dim_first() else 1]
    recurrent = spec.shapes[1]
    if spec.mamba_type is StateKind.MAMBA1 and width == recurrent[0]:
        return {"x": (width, width * tp_size)}
    if len(recurrent) != 3:
        return None
    values = recurrent[0] * recurrent[1]
    others, rest = divmod(width - values, 2)
    units, uneven = divmod(others, recurrent[2])
    if rest or uneven or units < 1:
        return None
    if spec.mamba_type is StateKind.MAMBA2:
        stated = [getattr(config, name) for name in _GROUP_COUNTS if hasattr(config, name)]
        # A model with one group has it on every rank.
        groups = 1 if units == 1 and 1 in stated else units * tp_size
        return {
            "x": (values, recurrent[0] * tp_size),
            "B": (others, groups),
            "C": (others, groups),
        }
    if spec.mamba_type is StateKind.GDN_ATTN:
        return {
            "q": (others, units * tp_size),
            "k": (others, units * tp_size),
            "v": (values, recurrent[0] * tp_size),
        }
    return None


def shorten_prefill_leg(request: Any) -> None:
    """Let a prefill leg compute all tokens of the prompt but the last, and generate one token.

    The decode side computes the last token of a prompt itself, because it needs the token's logits.
    It continues from the states after the token before, and no token can be taken back out of a
    state.
    """
    is_left_whole = (
        request.num_prompt_tokens < 2
        # The decode side loads nothing for such a request.
        or request.skip_reading_prefix_cache
        or request.prompt_embeds is not None
        # More of the prompt follows.
        or request.resumable
    )
    if is_left_whole:
        return
    # The n requests of one request with n choices may share the list.
    request.prompt_token_ids = request.prompt_token_ids[:-1]
    # vLLM's `all_token_ids` is a view of this list.
    del request._all_token_ids[-1]  # noqa: SLF001
    request.num_prompt_tokens -= 1
    request.max_tokens = 1
