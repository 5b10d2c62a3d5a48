"""The block store: our own cache memory, as the transfer worker may rearrange and copy it.

Transports read and write the regions that were registered with them. Those are the engine's own cache, or a host buffer of it in host
memory with the same block numbers (a *staged* cache): then blocks are exposed in the host buffer before peers read them, and brought from
it when they have arrived.

Contract, checked by `tests/planes/test_block_store.py`:

- One thread owns a store and makes every call. Nothing here blocks for longer than one bounded slice of work, about a millisecond.
- `place` and `copy_to_host_buffer` return at once with a handle; `poll` does the work and yields each handle exactly once, done or failed.
- Regions, offsets, strides and block numbers are checked before any address is computed: LocalProtocolError, with nothing begun.
- Once begun, errors are values: `StoreCompletion.error`. Blocks of a failed job are no longer touched, and what is in them is worthless.
- A job is never stopped halfway: whoever wants the blocks back waits for its handle.
- Jobs do not order each other. No two that are under way may write the same block, unless they write the same bytes.
- The engine has finished writing the blocks that are exposed, and touches those that are placed only after the handle has come back. If it
  takes exposed blocks back before (a preemption), what is copied is worthless, and whoever asked for it says so to nobody.
- `close` is complete and idempotent; what was under way is dropped.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NewType, Protocol

from kvferry.protocol.placement import BlockPermutation
from kvferry.protocol.tickets import HOLE

__all__ = ["HOLE", "BlockPermutation", "BlockStore", "StoreCompletion", "StoreHandle"]

StoreHandle = NewType("StoreHandle", int)


@dataclass(frozen=True, slots=True)
class StoreCompletion:
    """A job has ended: its blocks are as they were asked for, or worthless."""

    handle: StoreHandle
    error: str | None


class BlockStore(Protocol):
    def place(self, permutations: Sequence[BlockPermutation], blocks: Sequence[Sequence[int]] = ()) -> StoreHandle:
        """Put what has arrived into our own order, in place. Then, of a staged cache, copy these blocks of each group to the engine."""

    def copy_to_host_buffer(self, blocks: Sequence[Sequence[int]]) -> StoreHandle:
        """Copy these blocks of each group from the engine to where transports see them. Holes are left out."""

    def poll(self) -> list[StoreCompletion]:
        """Work for a bounded time and return what has ended since the last call."""

    def poll_interval_s(self) -> float | None:
        """How soon `poll` wants to be called again: 0 for at once, None when there is nothing to do."""

    def close(self) -> None: ...
