"""Write grants: which blocks peers may write now, by grant id."""

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from kvferry.errors import LocalProtocolError
from kvferry.transports.base import Completion, Handle
from kvferry.types import Region

MAX_GRANT_ID = (1 << 64) - 1
"""Largest grant id: the wire carries grant ids in 64 bits. Grant id 0 means no grant."""

Int64Array = npt.NDArray[np.int64]


def write_grants_unsupported(transport: str) -> LocalProtocolError:
    return LocalProtocolError(
        f"{transport} does not support write grants, but was asked for one; this is a bug "
        "of the caller"
    )


def grant_not_active(grant_id: int) -> str:
    return f"write grant {grant_id} is not active"


def check_grant_id(grant_id: int) -> None:
    if not 0 <= grant_id <= MAX_GRANT_ID:
        raise LocalProtocolError(f"{grant_id} is not a grant id: 0 to {MAX_GRANT_ID}")


@dataclass(frozen=True, eq=False)
class GrantedBlocks:
    """The blocks of one grant. Their address ranges are computed only when a write is first
    compared with the grant: many grants are never used.
    """

    regions: tuple[Region, ...]
    blocks: tuple[tuple[int, ...], ...]
    """Block ids by group."""

    def covers(self, addresses: Int64Array, sizes: Int64Array) -> bool:
        """Whether every segment of a write lies in the granted blocks. Each size is at least 1, and
        the end of each segment fits in 64 bits: the caller has checked both.
        """
        starts, ends = self._ranges
        at = np.searchsorted(starts, addresses, side="right") - 1
        return bool(len(starts)) and bool(np.all((at >= 0) & (addresses + sizes <= ends[at])))

    @cached_property
    def _ranges(self) -> tuple[Int64Array, Int64Array]:
        """Starts and ends of the granted ranges, ascending; adjacent and overlapping ranges are
        merged.
        """
        by_group = [np.array(ids, np.int64) for ids in self.blocks]
        owned = [
            (region, by_group[region.group])
            for region in self.regions
            if region.group < len(by_group)
        ]
        first = [region.address + ids * region.stride_bytes for region, ids in owned]
        sizes = [np.full(len(ids), region.block_bytes, np.int64) for region, ids in owned]
        starts = np.concatenate([np.empty(0, np.int64), *first])
        order = np.argsort(starts, kind="stable")
        starts = starts[order]
        # The running maximum makes a block that lies inside an earlier, longer block harmless.
        ends = np.maximum.accumulate(
            starts + np.concatenate([np.empty(0, np.int64), *sizes])[order]
        )
        is_first = np.concatenate(([True], starts[1:] > ends[:-1]))[: len(starts)]
        is_last = np.concatenate((is_first[1:], [True]))[: len(starts)]
        return starts[is_first], ends[is_last]


class WriteGrants:
    """The active write grants over some regions, and how many writes are being received under each.
    Any thread may make any call.
    """

    def __init__(self, regions: tuple[Region, ...], ended: Callable[[Completion], None]) -> None:
        """`ended` is called once for each revocation, when no write can land under it any more."""
        self._regions = regions
        self._num_blocks: dict[int, int] = {}
        """Number of blocks by group: the blocks that every region of the group has."""
        for region in regions:
            self._num_blocks[region.group] = min(
                region.num_blocks, self._num_blocks.get(region.group, region.num_blocks)
            )
        self._ended = ended
        self._lock = threading.Lock()
        """Guards the collections below."""
        self._granted: dict[int, GrantedBlocks] = {}
        self._num_received: Counter[int] = Counter()
        """Number of writes that are being received, by grant id."""
        self._waiting: dict[int, list[Handle]] = defaultdict(list)
        """Revocations that wait for these writes, by grant id."""

    def grant(self, grant_id: int, blocks: Sequence[Sequence[int]]) -> None:
        """Activate a grant. LocalProtocolError, with nothing changed, if the grant id is 0 or
        active already, or if a block id does not exist.
        """
        check_grant_id(grant_id)
        ids = tuple(tuple(group) for group in blocks)
        for group, num_blocks in self._num_blocks.items():
            asked = ids[group] if group < len(ids) else ()
            if asked and not 0 <= min(asked) <= max(asked) < num_blocks:
                raise LocalProtocolError(
                    f"blocks {min(asked)} to {max(asked)} of group {group} cannot be "
                    f"granted; the group has {num_blocks} blocks"
                )
        with self._lock:
            if not grant_id or grant_id in self._granted:
                raise LocalProtocolError(
                    f"write grant {grant_id} cannot be activated: "
                    f"{'0 means no grant' if not grant_id else 'it is active already'}"
                )
            self._granted[grant_id] = GrantedBlocks(self._regions, ids)

    def revoke(self, grant_id: int, handle: Handle) -> bool:
        """Revoke a grant. Returns whether the revocation has ended; otherwise it ends with the last
        write that is being received under the grant.
        """
        with self._lock:
            self._granted.pop(grant_id, None)
            if self._num_received[grant_id]:
                self._waiting[grant_id].append(handle)
                return False
        self._ended(Completion(handle, None))
        return True

    def clear(self) -> None:
        """Revoke all grants, without a report."""
        with self._lock:
            self._granted.clear()

    def refusal(self, grant_id: int, addresses: Int64Array, sizes: Int64Array) -> str:
        """Why a write must be refused; empty if it is granted now."""
        with self._lock:
            granted = self._granted.get(grant_id)
        if granted is None:
            return grant_not_active(grant_id)
        if granted.covers(addresses, sizes):
            return ""
        return f"a write leaves the blocks of write grant {grant_id}"

    def begin(self, grant_id: int) -> bool:
        """Hold back the end of a grant while a write is received. Returns whether the grant is
        active; if it is, the caller calls `end` afterwards.
        """
        with self._lock:
            is_active = grant_id in self._granted
            if is_active:
                self._num_received[grant_id] += 1
        return is_active

    def end(self, grant_id: int) -> None:
        with self._lock:
            self._num_received[grant_id] -= 1
            if self._num_received[grant_id]:
                return
            del self._num_received[grant_id]
            handles = self._waiting.pop(grant_id, [])
        for handle in handles:
            self._ended(Completion(handle, None))

    @contextmanager
    def receiving(self, grant_id: int) -> Iterator[bool]:
        """`begin` and `end` around a block of code. Yields whether the grant is active."""
        is_active = self.begin(grant_id)
        try:
            yield is_active
        finally:
            if is_active:
                self.end(grant_id)
