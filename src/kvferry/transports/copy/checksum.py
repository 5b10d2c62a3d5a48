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

`_copy.c` computes the same while it copies, at the speed of memory. The sums of products can also
be computed on a device with 64-bit integers: the row is the sum over its n pieces of
v[i] * MULTIPLIER ** (n - i). Pure.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvferry.transports.copy.segments import Bytes

__all__ = [
    "GROUP_BYTES",
    "MULTIPLIER",
    "PIECE_BYTES",
    "Checksums",
    "checksum_key",
    "powers_of_multiplier",
    "row_checksum",
]

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


def row_checksum(segments: Sequence[Bytes]) -> int:
    """Return the checksum (64 bits) of a row with these segments."""
    values = np.concatenate([np.empty(0, np.uint64), *map(_piece_values, segments)])
    weights = powers_of_multiplier(len(values))[::-1]
    return int((values * weights).sum(dtype=np.uint64))


def powers_of_multiplier(count: int) -> Checksums:
    """Return MULTIPLIER ** 1 to MULTIPLIER ** count, modulo 2**64."""
    return np.multiply.accumulate(np.full(count, MULTIPLIER, np.uint64))


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
