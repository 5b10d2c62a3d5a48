"""The two sides of a data-transport conformance run: a near side in this process, and a far side in
this process or in a spawned process.

Each side has one memory of the same layout: small regions, one large region, and gaps that no
transfer may touch.
"""

import itertools
import multiprocessing
import os
import signal
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing.connection import Connection
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvferry.transports.base import Completion, DataTransport, Handle, TransportOffer
from kvferry.types import EngineId, Epoch, PeerId, Region

__all__ = [
    "DEADLINE_S",
    "LARGE_BLOCKS",
    "LARGE_BLOCK_BYTES",
    "LARGE_REGION",
    "MEMORY_BYTES",
    "SMALL_BLOCKS",
    "SMALL_BLOCK_BYTES",
    "SMALL_REGIONS",
    "Bytes",
    "FarSide",
    "InProcessFarSide",
    "SpawnedFarSide",
    "TransportPair",
    "TransportPairSource",
    "TransportSide",
    "TransportSideMaker",
    "digest",
    "layout",
    "pattern",
]

Bytes = npt.NDArray[np.uint8]

SMALL_REGIONS, SMALL_BLOCKS, SMALL_BLOCK_BYTES = 24, 64, 4096
LARGE_REGION, LARGE_BLOCKS, LARGE_BLOCK_BYTES = SMALL_REGIONS, 640, 64 * 1024
"""The large region is longer than any transport's slice or batch."""
GAP_BYTES = 4096
DEADLINE_S = 30.0
IDLE_S = 0.02
NEAR_SEED, FAR_SEEDS = 99, 3
MEMORY_BYTES = (
    SMALL_REGIONS * (SMALL_BLOCKS * SMALL_BLOCK_BYTES + GAP_BYTES)
    + LARGE_BLOCKS * LARGE_BLOCK_BYTES
    + 2 * GAP_BYTES
)


# Grant ids.
_grant_ids = itertools.count(1)


def layout(address: int) -> tuple[Region, ...]:
    """The regions of a memory that starts at `address`."""
    regions = []
    at = address + GAP_BYTES
    for number in range(SMALL_REGIONS):
        regions.append(
            Region(f"small.{number}", at, SMALL_BLOCK_BYTES, SMALL_BLOCK_BYTES, SMALL_BLOCKS)
        )
        at += SMALL_BLOCKS * SMALL_BLOCK_BYTES + GAP_BYTES
    return (
        *regions,
        Region("large", at, LARGE_BLOCK_BYTES, LARGE_BLOCK_BYTES, LARGE_BLOCKS, group=1),
    )


@lru_cache(maxsize=4)
def pattern(seed: int) -> Bytes:
    """The bytes that a memory is filled with. The array is shared and must not be written."""
    return np.random.default_rng(seed).integers(0, 256, MEMORY_BYTES, dtype=np.uint8)


@dataclass(slots=True)
class TransportSide:
    """A registered transport with MEMORY_BYTES of memory in the suite's layout. `close_memory` is
    called after the transport is closed.
    """

    transport: DataTransport
    memory: Bytes
    regions: tuple[Region, ...]
    close_memory: Callable[[], None]

    def close(self) -> None:
        self.transport.close()
        self.memory = np.empty(0, np.uint8)
        self.close_memory()


TransportSideMaker = Callable[[], TransportSide]
"""Makes one side. For a spawned far side the callable must be picklable: a function of a module."""


class FarSide(Protocol):
    """The far side, as far as a case may use it."""

    regions: tuple[Region, ...]
    offer: TransportOffer
    supports_write_grants: bool

    def fill(self, seed: int) -> None: ...
    def digest(self) -> int: ...
    def fill_with(self, value: int) -> None: ...
    def filled_with(self) -> bool:
        """Whether the large region holds a single value, judged by one byte of every page."""

    def grant_writes(self, grant_id: int, blocks: Sequence[Sequence[int]]) -> None: ...
    def revoke_writes(self, grant_id: int) -> int:
        """Revoke a grant and return the number of polls that the revocation took."""

    def tick(self) -> None:
        """Let the far side make progress, if it does not do so by itself."""

    def die(self) -> None: ...
    def close(self) -> None: ...


class InProcessFarSide:
    """A far side in this process. `die` closes the transport, which only some transports can
    notice.
    """

    def __init__(self, make: TransportSideMaker) -> None:
        self._side = make()
        self.regions = self._side.regions
        self.offer = self._side.transport.offer()
        self.supports_write_grants = self._side.transport.supports_write_grants

    def fill(self, seed: int) -> None:
        _execute(self._side, ("fill", seed))

    def digest(self) -> int:
        return _execute(self._side, ("digest", 0))

    def fill_with(self, value: int) -> None:
        _execute(self._side, ("fill with", value))

    def filled_with(self) -> bool:
        return bool(_execute(self._side, ("filled with", 0)))

    def grant_writes(self, grant_id: int, blocks: Sequence[Sequence[int]]) -> None:
        _execute(self._side, ("grant", (grant_id, blocks)))

    def revoke_writes(self, grant_id: int) -> int:
        return _execute(self._side, ("revoke", grant_id))

    def tick(self) -> None:
        self._side.transport.poll()

    def die(self) -> None:
        self._side.transport.close()

    def close(self) -> None:
        self._side.close()


class SpawnedFarSide:
    """A far side in its own process. `die` sends SIGKILL."""

    def __init__(self, make: TransportSideMaker) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, make), daemon=True)
        self._process.start()
        theirs.close()
        self.regions, self.offer, self.supports_write_grants = self._answer()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def fill(self, seed: int) -> None:
        self._ask("fill", seed)

    def digest(self) -> int:
        return self._ask("digest")

    def fill_with(self, value: int) -> None:
        self._ask("fill with", value)

    def filled_with(self) -> bool:
        return bool(self._ask("filled with"))

    def grant_writes(self, grant_id: int, blocks: Sequence[Sequence[int]]) -> None:
        self._ask("grant", (grant_id, blocks))

    def revoke_writes(self, grant_id: int) -> int:
        return self._ask("revoke", grant_id)

    def tick(self) -> None:
        return None

    def die(self) -> None:
        if self._process.pid is not None and self._process.is_alive():
            os.kill(self._process.pid, signal.SIGKILL)
        self._process.join(DEADLINE_S)

    def close(self) -> None:
        if self._process.is_alive():
            self._pipe.send(("close", 0))
            self._process.join(DEADLINE_S)
        self.die()
        self._pipe.close()
        self._process.close()

    def _ask(self, order: str, argument: object = 0) -> int:
        self._pipe.send((order, argument))
        answer: int = self._answer()
        return answer

    def _answer(self) -> Any:
        if not self._pipe.poll(DEADLINE_S):
            raise TimeoutError("the far side of a transport conformance run does not answer")
        return self._pipe.recv()


@dataclass(slots=True)
class TransportPair:
    """The near side, not yet connected, and the far side, filled with `pattern(far_seed)`."""

    near: TransportSide
    far: FarSide
    peer: PeerId
    far_seed: int

    def connect(self) -> None:
        self.near.transport.connect(self.peer, self.far.offer, self.far.regions)

    def grant_writes(self, *blocks: Sequence[int]) -> int:
        """Grant writes into some of the far side's blocks and return the new grant id."""
        grant_id = next(_grant_ids)
        self.far.grant_writes(grant_id, blocks)
        return grant_id

    def grant_all(self) -> int:
        """Grant writes into all blocks and return the grant id; 0 if the transport does not support
        write grants.
        """
        return (
            self.grant_writes(range(SMALL_BLOCKS), range(LARGE_BLOCKS))
            if self.far.supports_write_grants
            else 0
        )

    def tick(self) -> list[Completion]:
        self.far.tick()
        completions = self.near.transport.poll()
        interval_s = self.near.transport.poll_interval_s()
        if not completions and interval_s != 0.0:
            time.sleep(min(interval_s or IDLE_S, IDLE_S))
        return completions

    def wait(self, *handles: Handle) -> dict[Handle, Completion]:
        """The completions of exactly these handles; no other may complete, and none twice."""
        ended: dict[Handle, Completion] = {}
        deadline = time.monotonic() + DEADLINE_S
        while len(ended) < len(handles):
            assert time.monotonic() < deadline, (
                f"transfers {set(handles) - set(ended)} have not ended after {DEADLINE_S:g} s"
            )
            for completion in self.tick():
                assert completion.handle in handles, f"{completion} was not asked for"
                assert completion.handle not in ended, f"{completion} came twice"
                ended[completion.handle] = completion
        return ended

    def far_bytes(self, region: int, offset: int, size: int) -> Bytes:
        """The bytes that the far side was filled with."""
        at = self.far.regions[region].address - self.far.regions[0].address + GAP_BYTES + offset
        return pattern(self.far_seed)[at : at + size]

    def place(self, region: int, offset: int) -> int:
        """The position of an offset into a region in either memory."""
        return self.near.regions[region].address - self.near.regions[0].address + GAP_BYTES + offset


class TransportPairSource:
    """Makes pairs: a new near side for each pair, and one far side shared by all cases that do not
    kill it.
    """

    def __init__(
        self,
        make: TransportSideMaker,
        far: type[InProcessFarSide] | type[SpawnedFarSide],
        *,
        only_reads: bool = False,
    ) -> None:
        self.make = make
        self.only_reads = only_reads
        self._make_far_side = far
        self._shared: FarSide | None = None
        self._pairs = 0

    @contextmanager
    def pair(self) -> Iterator[TransportPair]:
        if self._shared is None:
            self._shared = self._make_far_side(self.make)
        near = self.make()
        try:
            yield self._filled(near, self._shared)
        finally:
            near.close()

    @contextmanager
    def disposable_far_side(self) -> Iterator[FarSide]:
        """A far side that the case may kill."""
        far = self._make_far_side(self.make)
        try:
            yield far
        finally:
            far.close()

    def let_far_side_poll(self) -> None:
        if self._shared is not None:
            self._shared.tick()
        time.sleep(IDLE_S)

    def close(self) -> None:
        if self._shared is not None:
            self._shared.close()
            self._shared = None

    def _filled(self, near: TransportSide, far: FarSide) -> TransportPair:
        self._pairs += 1
        seed = self._pairs % FAR_SEEDS
        near.memory[:] = pattern(NEAR_SEED)
        far.fill(seed)
        return TransportPair(
            near, far, PeerId(EngineId("far"), Epoch(f"life{self._pairs}"), 0), seed
        )


def digest(memory: Bytes) -> int:
    return zlib.crc32(memory.data)


def _serve(pipe: Connection, make: TransportSideMaker) -> None:
    """The main function of the far process: answers the suite, and polls as often as the transport
    asks for.
    """
    side = make()
    pipe.send((side.regions, side.transport.offer(), side.transport.supports_write_grants))
    while True:
        side.transport.poll()
        interval_s = side.transport.serving_interval_s()
        try:
            if not pipe.poll(IDLE_S if interval_s is None else interval_s):
                continue
            order = pipe.recv()
        except (EOFError, OSError):  # the suite's process has ended
            break
        if order[0] == "close":
            break
        pipe.send(_execute(side, order))
    side.close()


def _execute(side: TransportSide, order: tuple[str, Any]) -> int:
    """Execute one order of the suite on the far side."""
    match order:
        case "fill", seed:
            side.memory[:] = pattern(seed)
        case "fill with", value:
            side.memory[:] = value
        case "filled with", _:
            pages = side.memory[
                -(LARGE_BLOCKS * LARGE_BLOCK_BYTES + GAP_BYTES) : -GAP_BYTES : GAP_BYTES
            ]
            return int(np.all(pages == pages[0]))
        case "grant", (grant_id, blocks):
            side.transport.grant_writes(grant_id, blocks)
        case "revoke", grant_id:
            return _polls_until_ended(side.transport, side.transport.revoke_writes(grant_id))
        case _:
            return digest(side.memory)
    return 0


def _polls_until_ended(transport: DataTransport, handle: Handle) -> int:
    deadline = time.monotonic() + DEADLINE_S
    for polls in itertools.count(1):
        ended = transport.poll()
        if ended:
            assert [(each.handle, each.error) for each in ended] == [(handle, None)], (
                f"{ended} came instead of {handle}"
            )
            return polls
        assert time.monotonic() < deadline, f"a write grant was not revoked after {DEADLINE_S:g} s"
    raise AssertionError
