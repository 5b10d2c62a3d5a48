"""The tokens of one step as flat tensors, and the plan of their attention.

The tokens of all sequences are concatenated:

    slices   |   a (prefill, 5)   | b (1) | c (1) |  d (prefill, 3) |
    row        0   1   2   3   4     5       6       7    8    9

Sequences with one new token attend together with sequences of similar length (`DecodeTile`); every
other sequence attends by itself (`PrefillRange`). Each KV-cache group has its own block tables and
therefore its own plans; the tables of a group with a window begin at the first block that the group
attends to. Layers that keep a state have no plan, but one block per sequence (`StateBatch`).

Pure: slices in, tensors out. The tensors are built on the CPU and then moved to the device as a
whole (`FlatBatch.on`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch

from kvferry.connectors.contract import KVCacheGroup
from kvferry.engine.messages import SequenceSlice
from kvferry.engine.model.device import to_device
from kvferry.errors import LocalProtocolError
from kvferry.protocol.tickets import NO_BLOCK

DECODE_TILE_TOKENS = 4096
"""Bound on the padded context tokens of a tile, so that K and V fit into the CPU caches."""


@dataclass(frozen=True, slots=True, eq=False)
class DecodeTile:
    """Sequences with one query each that attend together."""

    rows: torch.Tensor
    """[sequences]: the rows of the queries."""
    block_tables: torch.Tensor
    """[sequences, blocks]: block ids; short tables are padded with a block of their own."""
    hidden: torch.Tensor
    """[sequences, blocks * block_size]: True for slots that the query must not see."""
    stale: tuple[torch.Tensor, torch.Tensor]
    """(sequence, slot) of the hidden slots that may contain arbitrary bytes.

    These are all hidden slots except padding with a block that the query sees completely.
    """

    def on(self, device: torch.device) -> "DecodeTile":
        sequences, slots = self.stale
        return DecodeTile(
            to_device(self.rows, device),
            to_device(self.block_tables, device),
            to_device(self.hidden, device),
            (to_device(sequences, device), to_device(slots, device)),
        )


@dataclass(frozen=True, slots=True, eq=False)
class PrefillRange:
    """The rows [first_row, first_row + num_rows) of one sequence, also adjacent in the cache."""

    first_row: int
    num_rows: int
    block_table: torch.Tensor
    """[1, blocks]: block ids from the first visible block on."""
    first_slot: int
    """The first slot within these blocks that any row sees."""
    first_row_slot: int
    """The slot of the first row."""
    window: int | None

    def on(self, device: torch.device) -> "PrefillRange":
        return replace(self, block_table=to_device(self.block_table, device))


@dataclass(frozen=True, slots=True, eq=False)
class AttentionPlan:
    """How the rows of a batch attend in one group."""

    decodes: tuple[DecodeTile, ...] = ()
    prefills: tuple[PrefillRange, ...] = ()

    def on(self, device: torch.device) -> "AttentionPlan":
        return AttentionPlan(
            tuple(tile.on(device) for tile in self.decodes),
            tuple(part.on(device) for part in self.prefills),
        )


@dataclass(frozen=True, slots=True, eq=False)
class GroupBatch:
    """The part of a batch that is specific to one KV-cache group."""

    blocks: torch.Tensor
    """The block of each row; `FlatBatch.offsets` has the slot within the block."""
    plan: AttentionPlan
    """How each row attends."""
    sampled_plan: AttentionPlan
    """How only the sampled rows attend, numbered from 0; the last layer needs no other rows."""

    def on(self, device: torch.device) -> "GroupBatch":
        plan = self.plan.on(device)
        sampled_plan = plan if self.sampled_plan is self.plan else self.sampled_plan.on(device)
        return GroupBatch(to_device(self.blocks, device), plan, sampled_plan)


@dataclass(frozen=True, slots=True, eq=False)
class StateRun:
    """Sequences with equally many rows, whose states advance together, token by token."""

    blocks: torch.Tensor
    """[sequences]: the block with the state of each sequence."""
    is_new: torch.Tensor
    """[sequences]: True if the sequence begins in this step; its block then holds an old state."""
    rows: torch.Tensor
    """[sequences, rows of a sequence]"""

    def on(self, device: torch.device) -> "StateRun":
        return StateRun(
            to_device(self.blocks, device),
            to_device(self.is_new, device),
            to_device(self.rows, device),
        )


@dataclass(frozen=True, slots=True, eq=False)
class StateBatch:
    """The part of a batch that is specific to a group of layers that keep a state."""

    runs: tuple[StateRun, ...]

    def on(self, device: torch.device) -> "StateBatch":
        return StateBatch(tuple(run.on(device) for run in self.runs))


@dataclass(frozen=True, slots=True, eq=False)
class FlatBatch:
    """The tokens of one step."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    offsets: torch.Tensor
    """The slot of each row within its block."""
    groups: tuple[GroupBatch | StateBatch, ...]
    sampled_rows: torch.Tensor
    """The last row of each slice that has `sampling`."""

    def on(self, device: torch.device) -> "FlatBatch":
        """Return the batch on `device`; on the CPU, return the batch itself."""
        if device.type == "cpu":
            return self
        return FlatBatch(
            to_device(self.token_ids, device),
            to_device(self.positions, device),
            to_device(self.offsets, device),
            tuple(group.on(device) for group in self.groups),
            to_device(self.sampled_rows, device),
        )


def make_flat_batch(
    slices: Sequence[SequenceSlice],
    groups: Sequence[KVCacheGroup],
    block_size: int,
    num_blocks: int,
    vocab_size: int,
) -> FlatBatch:
    # Use lists, not a tensor per slice: most slices of most steps hold one token, and a tensor
    # costs as much as a hundred numbers.
    token_ids: list[int] = []
    positions: list[int] = []
    sampled_rows: list[int] = []
    parts = [_StatePart() if group.is_state else _GroupPart(group, block_size) for group in groups]
    for each in slices:
        _check(each, groups, block_size, num_blocks, vocab_size)
        for part, block_ids in zip(parts, each.block_ids, strict=True):
            part.add(each, block_ids, len(token_ids))
        token_ids.extend(each.token_ids)
        positions.extend(range(each.start, each.start + len(each.token_ids)))
        if each.sampling is not None:
            sampled_rows.append(len(token_ids) - 1)
    return FlatBatch(
        token_ids=torch.tensor(token_ids),
        positions=torch.tensor(positions),
        offsets=torch.tensor(positions) % block_size,
        groups=tuple(part.batch() for part in parts),
        sampled_rows=torch.tensor(sampled_rows, dtype=torch.int64),
    )


def _check(
    part: SequenceSlice,
    groups: Sequence[KVCacheGroup],
    block_size: int,
    num_blocks: int,
    vocab_size: int,
) -> None:
    """Raise LocalProtocolError for a slice that would read or write another sequence's memory."""
    length = part.start + len(part.token_ids)
    problem = None
    if not part.token_ids or part.start < 0:
        problem = f"{len(part.token_ids)} tokens at {part.start}"
    elif min(part.token_ids) < 0 or max(part.token_ids) >= vocab_size:
        problem = f"a token outside the vocabulary's {vocab_size}"
    elif len(part.block_ids) != len(groups):
        problem = f"{len(part.block_ids)} block tables for {len(groups)} groups"
    else:
        tables = zip(groups, part.block_ids, strict=True)
        problem = next(
            filter(
                None,
                (_table_problem(part, length, *table, block_size, num_blocks) for table in tables),
            ),
            None,
        )
    if problem:
        raise LocalProtocolError(f"request {part.request_id} was scheduled with {problem}")


def _table_problem(
    part: SequenceSlice,
    length: int,
    group: KVCacheGroup,
    block_ids: tuple[int, ...],
    block_size: int,
    num_blocks: int,
) -> str | None:
    block_size = group.tokens_per_entry(block_size)
    if length > len(block_ids) * block_size:
        return f"{len(block_ids)} blocks for {length} tokens"
    if max(block_ids) >= num_blocks or min(block_ids) < NO_BLOCK:
        return f"a block outside the cache's {num_blocks}"
    if (
        NO_BLOCK
        in block_ids[group.first_visible_token(part.start) // block_size : -(-length // block_size)]
    ):
        return (
            f"a null block where tokens {group.first_visible_token(part.start)} to {length - 1} "
            "are needed"
        )
    return None


@dataclass(frozen=True, slots=True)
class _Query:
    """One row, which sees the slots [first, end) of `block_ids`."""

    row: int
    first: int
    end: int
    block_ids: tuple[int, ...]


@dataclass(slots=True)
class _StatePart:
    """Collects the part of the batch for one group of layers that keep a state."""

    sequences: dict[int, list[tuple[int, int, bool]]] = field(default_factory=dict)
    """(first row, block, whether the sequence begins), by the number of rows."""

    def add(self, part: SequenceSlice, block_ids: tuple[int, ...], first_row: int) -> None:
        # The first entry of the table stands for all tokens of a sequence.
        self.sequences.setdefault(len(part.token_ids), []).append(
            (first_row, block_ids[0], part.start == 0)
        )

    def batch(self) -> StateBatch:
        return StateBatch(tuple(_state_run(count, each) for count, each in self.sequences.items()))


def _state_run(num_rows: int, sequences: Sequence[tuple[int, int, bool]]) -> StateRun:
    first_rows, blocks, is_new = (torch.tensor(column) for column in zip(*sequences, strict=True))
    return StateRun(blocks, is_new, first_rows[:, None] + torch.arange(num_rows))


@dataclass(slots=True)
class _GroupPart:
    """Collects the part of the batch for one group, slice by slice."""

    group: KVCacheGroup
    block_size: int
    blocks: list[int] = field(default_factory=list)
    prefills: list[PrefillRange] = field(default_factory=list)
    decodes: list[_Query] = field(default_factory=list)
    sampled: list[_Query] = field(default_factory=list)

    def add(self, part: SequenceSlice, block_ids: tuple[int, ...], first_row: int) -> None:
        count, length = len(part.token_ids), part.start + len(part.token_ids)
        self.blocks.extend(
            block_ids[position // self.block_size] for position in range(part.start, length)
        )
        if count == 1:
            self.decodes.append(self._query(first_row, length, block_ids))
        else:
            first = self.group.first_visible_token(part.start)
            base = first // self.block_size
            table = torch.tensor([block_ids[base : -(-length // self.block_size)]])
            first_slot, first_row_slot = (
                first - base * self.block_size,
                part.start - base * self.block_size,
            )
            self.prefills.append(
                PrefillRange(
                    first_row, count, table, first_slot, first_row_slot, self.group.sliding_window
                )
            )
        if part.sampling is not None:
            self.sampled.append(self._query(len(self.sampled), length, block_ids))

    def batch(self) -> GroupBatch:
        plan = AttentionPlan(_decode_tiles(self.decodes, self.block_size), tuple(self.prefills))
        # Most steps only decode, and then all rows are sampled.
        is_same = not self.prefills and self.sampled == self.decodes
        sampled_plan = (
            plan if is_same else AttentionPlan(_decode_tiles(self.sampled, self.block_size))
        )
        return GroupBatch(torch.tensor(self.blocks), plan, sampled_plan)

    def _query(self, row: int, length: int, block_ids: tuple[int, ...]) -> _Query:
        """Return the query of the token at position `length` - 1."""
        first = self.group.first_visible_token(length - 1)
        base = first // self.block_size
        start = base * self.block_size
        return _Query(
            row, first - start, length - start, block_ids[base : -(-length // self.block_size)]
        )


def _decode_tiles(queries: Sequence[_Query], block_size: int) -> tuple[DecodeTile, ...]:
    return tuple(
        _decode_tile(tile, block_size) for tile in _tiles_of_like_length(queries, block_size)
    )


def _tiles_of_like_length(queries: Sequence[_Query], block_size: int) -> Iterator[list[_Query]]:
    """Split queries into tiles, longest first, so that the first query of a tile sets its width."""
    tile: list[_Query] = []
    for query in sorted(queries, key=lambda query: -query.end):
        if tile and (len(tile) + 1) * len(tile[0].block_ids) * block_size > DECODE_TILE_TOKENS:
            yield tile
            tile = []
        tile.append(query)
    if tile:
        yield tile


def _decode_tile(tile: list[_Query], block_size: int) -> DecodeTile:
    width = len(tile[0].block_ids)
    firsts = torch.tensor([query.first for query in tile])[:, None]
    ends = torch.tensor([query.end for query in tile])[:, None]
    paddings = [_padding(query, block_size) for query in tile]
    own_ends = torch.tensor(
        [
            width * block_size if padding is None else len(query.block_ids) * block_size
            for query, padding in zip(tile, paddings, strict=True)
        ]
    )[:, None]
    slots = torch.arange(width * block_size)
    hidden = (slots < firsts) | (slots >= ends)
    sequence, slot = torch.nonzero(hidden & (slots < own_ends), as_tuple=True)
    return DecodeTile(
        rows=torch.tensor([query.row for query in tile]),
        block_tables=torch.tensor(
            [
                query.block_ids
                + (query.block_ids[0] if padding is None else padding,)
                * (width - len(query.block_ids))
                for query, padding in zip(tile, paddings, strict=True)
            ]
        ),
        hidden=hidden,
        stale=(sequence, slot),
    )


def _padding(query: _Query, block_size: int) -> int | None:
    """Return a block that the query sees completely, or None if there is no such block.

    As padding, the block is read twice, but it holds valid data of the same sequence.
    """
    index = 0 if query.first == 0 else 1
    return query.block_ids[index] if query.end >= (index + 1) * block_size else None
