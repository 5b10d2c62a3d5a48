"""The kernel that sums the pieces of many segments on a GPU, for the checksums of
`copy/checksum.py`.
"""

import torch
import triton
import triton.language as tl

WARPS = 4


@triton.jit
def _sum(addresses, sizes, firsts, key, out):
    """Sum one piece of one segment: `v` in the definition. Each product pairs word i of a group of
    16 words with word i + 8.
    """
    segment, piece = tl.program_id(0), tl.program_id(1)
    left = tl.load(sizes + segment) - piece * 4096
    if left > 0:
        start = tl.load(addresses + segment) + piece.to(tl.int64) * 4096
        words = start.to(tl.pointer_type(tl.int32))
        nth = tl.arange(0, 512)
        low = (nth // 8) * 16 + nth % 8
        # A segment consists of whole groups, so a group exists or does not.
        exists = low * 4 < left
        one = tl.load(words + low, mask=exists, other=0) ^ tl.load(key + low)
        other = tl.load(words + low + 8, mask=exists, other=0) ^ tl.load(key + low + 8)
        factor = (one.to(tl.int64) & 0xFFFFFFFF) + 0x100000000
        factors = factor * ((other.to(tl.int64) & 0xFFFFFFFF) + 0x100000000)
        total = tl.sum(tl.where(exists, factors, 0), axis=0)
        tl.store(out + tl.load(firsts + segment) + piece, total + tl.minimum(left, 4096))


def sum_pieces(
    addresses: torch.Tensor,
    sizes: torch.Tensor,
    firsts: torch.Tensor,
    key: torch.Tensor,
    num_pieces: tuple[int, int],
) -> torch.Tensor:
    """Return the sums of all pieces, in order, on the current stream. `firsts` is the number of
    pieces before each segment; `num_pieces` the most of a segment, and those of all segments.
    """
    most, total = num_pieces
    out = torch.empty(total, dtype=torch.int64, device=addresses.device)
    _sum[(len(addresses), most)](addresses, sizes, firsts, key, out, num_warps=WARPS)
    return out
