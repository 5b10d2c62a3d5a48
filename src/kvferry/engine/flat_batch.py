"""The tokens of one step as flat tensors, and how they are grouped for attention.

Tokens of all sequences lie one after the other:

    slices   |   a (prefill, 5)   | b (1) | c (1) |  d (prefill, 3) |
    row        0   1   2   3   4     5       6       7    8    9

A sequence with one new token is attended to together with others of like length (`DecodeTile`), any other by itself (`PrefillRange`).
Pure: slices in, tensors out.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from kvferry.engine.step import SequenceSlice
from kvferry.errors import LocalProtocolError

__all__ = ["AttentionPlan", "DecodeTile", "FlatBatch", "PrefillRange", "make_flat_batch"]

DECODE_TILE_TOKENS = 4096
"""Bound on the padded context tokens gathered at once, so that a tile's K and V stay small enough for the processor's caches."""


@dataclass(frozen=True, slots=True, eq=False)
class DecodeTile:
    """Sequences with one query each."""

    rows: torch.Tensor
    """[sequences]: where their queries are."""
    block_tables: torch.Tensor
    """[sequences, blocks], shorter ones padded with a block of their own."""
    beyond: torch.Tensor
    """[sequences, blocks * block_size]: slots after a sequence's last token."""
    stale: tuple[torch.Tensor, torch.Tensor]
    """(sequence, slot) of those of them that an earlier owner of the last block may have written."""


@dataclass(frozen=True, slots=True, eq=False)
class PrefillRange:
    """One sequence's rows [first_row, first_row + num_rows), at positions start, start + 1, …"""

    first_row: int
    num_rows: int
    start: int
    block_table: torch.Tensor
    """[1, blocks]"""


@dataclass(frozen=True, slots=True, eq=False)
class AttentionPlan:
    decodes: tuple[DecodeTile, ...] = ()
    prefills: tuple[PrefillRange, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class FlatBatch:
    token_ids: torch.Tensor
    positions: torch.Tensor
    blocks: torch.Tensor
    offsets: torch.Tensor
    """With `blocks`: the cache slot of each row."""
    plan: AttentionPlan
    """How each row attends."""
    sampled_rows: torch.Tensor
    """The last row of each slice that has `sampling`."""
    sampled_plan: AttentionPlan
    """How those rows alone attend, numbered from 0: all the last layer has to do."""


def make_flat_batch(slices: Sequence[SequenceSlice], block_size: int, num_blocks: int, vocab_size: int) -> FlatBatch:
    # Lists, not a tensor per slice: most slices of most steps hold one token, and a tensor costs as much as a hundred numbers.
    token_ids: list[int] = []
    positions: list[int] = []
    blocks: list[int] = []
    prefills: list[PrefillRange] = []
    decodes: list[_Query] = []
    sampled: list[_Query] = []
    sampled_rows: list[int] = []
    for part in slices:
        _check(part, block_size, num_blocks, vocab_size)
        first_row, count, length = len(token_ids), len(part.token_ids), part.start + len(part.token_ids)
        block_ids = part.block_ids[0][: -(-length // block_size)]
        if count == 1:
            decodes.append(_Query(first_row, length, block_ids))
        else:
            prefills.append(PrefillRange(first_row, count, part.start, torch.tensor([block_ids])))
        token_ids.extend(part.token_ids)
        positions.extend(range(part.start, length))
        blocks.extend(block_ids[position // block_size] for position in range(part.start, length))
        if part.sampling is not None:
            sampled.append(_Query(len(sampled), length, block_ids))
            sampled_rows.append(len(token_ids) - 1)
    return FlatBatch(
        token_ids=torch.tensor(token_ids),
        positions=torch.tensor(positions),
        blocks=torch.tensor(blocks),
        offsets=torch.tensor(positions) % block_size,
        plan=AttentionPlan(_decode_tiles(decodes, block_size), tuple(prefills)),
        sampled_rows=torch.tensor(sampled_rows, dtype=torch.int64),
        sampled_plan=AttentionPlan(_decode_tiles(sampled, block_size)),
    )


@dataclass(frozen=True, slots=True)
class _Query:
    """One row that attends to a sequence's first `length` tokens."""

    row: int
    length: int
    block_ids: tuple[int, ...]


def _check(part: SequenceSlice, block_size: int, num_blocks: int, vocab_size: int) -> None:
    """A slice that does not fit would read or write another sequence's memory."""
    length = part.start + len(part.token_ids)
    problem = None
    if not part.token_ids or part.start < 0:
        problem = f"{len(part.token_ids)} tokens at {part.start}"
    elif length > len(part.block_ids[0]) * block_size:
        problem = f"{len(part.block_ids[0])} blocks for {length} tokens"
    elif min(part.block_ids[0]) < 0 or max(part.block_ids[0]) >= num_blocks:
        problem = f"a block outside the cache's {num_blocks}"
    elif min(part.token_ids) < 0 or max(part.token_ids) >= vocab_size:
        problem = f"a token outside the vocabulary's {vocab_size}"
    if problem:
        raise LocalProtocolError(f"request {part.request_id} was scheduled with {problem}")


def _decode_tiles(queries: Sequence[_Query], block_size: int) -> tuple[DecodeTile, ...]:
    return tuple(_decode_tile(group, block_size) for group in _groups_of_like_length(queries, block_size))


def _groups_of_like_length(queries: Sequence[_Query], block_size: int) -> Iterator[list[_Query]]:
    """Longest first, so that the first of a group sets its width."""
    group: list[_Query] = []
    for query in sorted(queries, key=lambda query: -query.length):
        if group and (len(group) + 1) * len(group[0].block_ids) * block_size > DECODE_TILE_TOKENS:
            yield group
            group = []
        group.append(query)
    if group:
        yield group


def _decode_tile(group: list[_Query], block_size: int) -> DecodeTile:
    width = len(group[0].block_ids)
    lengths = torch.tensor([query.length for query in group])[:, None]
    ends = torch.tensor([len(query.block_ids) * block_size for query in group])[:, None]
    slots = torch.arange(width * block_size)
    sequence, slot = torch.nonzero((slots >= lengths) & (slots < ends), as_tuple=True)
    return DecodeTile(
        rows=torch.tensor([query.row for query in group]),
        # Padding repeats a block of the same sequence, so that nothing of another one, not even a NaN, can reach it.
        block_tables=torch.tensor([query.block_ids + query.block_ids[:1] * (width - len(query.block_ids)) for query in group]),
        beyond=slots >= lengths,
        stale=(sequence, slot),
    )
