"""Which layers share a block table. Pure.

All groups draw blocks from one pool: there are as many slots of memory per block as the largest group has layers, layer j of every group
lies in slot j, and a block belongs to one group at a time. So groups are cut to the size of the scarcest kind, and few slots stay unused.

    layers     w0 w1 f2 w3 w4 f5        (f: full attention, w: with a window)
    groups     0: f2 f5    1: w0 w1    2: w3 w4
    slot 0        f2          w0          w3         the same memory, other blocks
    slot 1           f5          w1          w4
"""

from kvferry.connectors.contract import KVCacheGroup
from kvferry.engine.model_config import ModelConfig

__all__ = ["form_groups"]


def form_groups(config: ModelConfig) -> tuple[KVCacheGroup, ...]:
    """Full attention first, then windows, the widest first."""
    kinds: dict[int | None, list[str]] = {}
    for number, layer in enumerate(config.layers):
        kinds.setdefault(layer.window, []).append(config.layer_name(number))
    size = min(len(names) for names in kinds.values())
    return tuple(
        KVCacheGroup(tuple(kinds[window][first : first + size]), sliding_window=window)
        for window in sorted(kinds, key=lambda window: -(window or config.max_position_embeddings))
        for first in range(0, len(kinds[window]), size)
    )
