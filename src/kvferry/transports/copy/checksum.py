"""The checksum of a row of KV: its definition, with numpy.

A row consists of segments, one for each block and region. A checksum finds bytes that changed
during a copy: another process has overwritten the row, or memory is damaged. The key table is
public, so the checksum is no protection against a forger.

Definition, all numbers modulo 2**64:

    segment   cut into pieces of `PIECE_BYTES`; the last piece may be shorter
    piece     padded with zeros to groups of `GROUP_BYTES`, read as 32-bit little-endian words and
              XORed with the first words of the key table: words x[g][0] to x[g][15] of group g
    v         the sum over all g and all i < 8 of (2**32 + x[g][i]) * (2**32 + x[g][i + 8]),
              plus the length of the piece in bytes
    row       over the pieces of all its segments, in order: h = (h + v) * MULTIPLIER, from h = 0

Any change within one aligned 32-bit word changes the checksum for certain: one factor of one
product changes by less than 2**32 and the other is at least 2**32 and less than 2**33, so their
product cannot be a multiple of 2**64; and `MULTIPLIER` is odd, so a row differs if one of its
pieces does. Other changes are missed with a chance of about 2**-64 if the bytes are unrelated.

The checksum of a row of n pieces is the sum of all v[i] * MULTIPLIER ** (n - i). So segments can be
summed in any order, and on a device with 64-bit integers. `_copy.c` sums each segment while it
copies, at the speed of memory. Pure.
"""

from itertools import pairwise

import numpy as np
import numpy.typing as npt

from kvferry.transports.copy.segments import Bytes, Offsets

PIECE_BYTES = 4096
GROUP_BYTES = 64
MULTIPLIER = 0x9E3779B97F4A7C15

Checksums = npt.NDArray[np.uint64]

_GROUPS_PER_PIECE = PIECE_BYTES // GROUP_BYTES
_WORDS_PER_GROUP = GROUP_BYTES // 4
_HIGH = np.uint64(1 << 32)


def checksum_key() -> npt.NDArray[np.uint32]:
    """The key table, `PIECE_BYTES` long: the output of the generator splitmix64 from seed 0."""
    words = np.arange(1, PIECE_BYTES // 8 + 1, dtype=np.uint64) * np.uint64(MULTIPLIER)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    words ^= words >> np.uint64(31)
    return words.astype("<u8").view("<u4")


_KEY = checksum_key().reshape(_GROUPS_PER_PIECE, _WORDS_PER_GROUP)


def segment_checksum(segment: Bytes) -> int:
    """Return the checksum (64 bits) of a row with this segment alone."""
    values = _piece_values(segment)
    return int((values * powers_of_multiplier(len(values))[:0:-1]).sum(dtype=np.uint64))


def row_checksums(segments: Checksums, sizes: Offsets, ends: Offsets) -> Checksums:
    """Return the checksums of rows, from the checksums and the sizes in bytes of all their
    segments, row after row; the segments of row `r` end before segment `ends[r]`.
    """
    if _are_alike(sizes, ends):  # nearly always: their weights are computed once
        weights = _segment_weights(sizes[: ends[0]])
        checksums: Checksums = (segments.reshape(len(ends), -1) * weights).sum(
            axis=1, dtype=np.uint64
        )
        return checksums
    rows = [slice(first, end) for first, end in pairwise([0, *ends.tolist()])]
    return np.array(
        [(segments[row] * _segment_weights(sizes[row])).sum(dtype=np.uint64) for row in rows],
        np.uint64,
    )


def _are_alike(sizes: Offsets, ends: Offsets) -> bool:
    """Whether all rows have segments of the same sizes, and at least one."""
    count = int(ends[0]) if len(ends) else 0
    return (
        0 < count * len(ends) == len(sizes)
        and bool((ends == np.arange(1, len(ends) + 1) * count).all())
        and bool((sizes.reshape(-1, count) == sizes[:count]).all())
    )


def _segment_weights(sizes: Offsets) -> Checksums:
    """The factor with which the checksum of each segment of a row counts: MULTIPLIER to the power
    of the number of pieces in the following segments.
    """
    pieces = -(-sizes // PIECE_BYTES)
    pieces_after = pieces[::-1].cumsum()[::-1] - pieces
    return powers_of_multiplier(int(pieces_after.max(initial=0)))[pieces_after]


def powers_of_multiplier(last: int) -> Checksums:
    """Return MULTIPLIER ** 0 to MULTIPLIER ** last, modulo 2**64."""
    powers = np.full(last + 1, MULTIPLIER, np.uint64)
    powers[0] = 1
    return np.multiply.accumulate(powers)


def _piece_values(segment: Bytes) -> Checksums:
    """Return v of each piece of one segment."""
    size = len(segment)
    if not size:
        return np.empty(0, np.uint64)
    num_groups = -(-size // GROUP_BYTES)
    padded = np.zeros(num_groups * GROUP_BYTES, np.uint8)
    padded[:size] = segment
    nth_in_piece = np.arange(num_groups) % _GROUPS_PER_PIECE
    words = padded.view("<u4").reshape(num_groups, _WORDS_PER_GROUP) ^ _KEY[nth_in_piece]
    factors = words.astype(np.uint64) + _HIGH
    half = _WORDS_PER_GROUP // 2
    groups = (factors[:, :half] * factors[:, half:]).sum(axis=1, dtype=np.uint64)
    starts = np.arange(0, size, PIECE_BYTES)
    lengths = np.minimum(PIECE_BYTES, size - starts).astype(np.uint64)
    return np.add.reduceat(groups, starts // GROUP_BYTES) + lengths
