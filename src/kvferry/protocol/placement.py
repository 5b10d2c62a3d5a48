"""Blocks that arrived in another order than ours, and how they are put into ours. Plain data; pure.

A read brings blocks as the producer arranges them, because that takes the fewest segments. Where the consumer's attention wants another
order (heads before tokens, say), every block is put in order once all of it is here, in place.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["BlockPermutation"]


@dataclass(frozen=True, slots=True, eq=False)
class BlockPermutation:
    """Some blocks of one of our regions; all are to be rearranged alike.

    A block holds `prod(shape)` items of `item_bytes`. The item with index (i, j, …) lies at i * arrived[0] + j * arrived[1] + … bytes from
    the block's start, and belongs at i * wanted[0] + j * wanted[1] + …
    """

    region: int
    block_bytes: int
    offsets: npt.NDArray[np.int64]
    """Where each block starts, in bytes from the region's start."""
    item_bytes: int
    shape: tuple[int, ...]
    arrived: tuple[int, ...]
    wanted: tuple[int, ...]
