"""What a staged producer has copied of its leases, and what waits for that. Pure.

Readers of a staged producer read a copy of the blocks. A granted lease is copied once; an open one (a prefill that is handed over while it
is computed) piece by piece, and each piece is offered when it, and all before it, has been copied.

    copy      waiting for its turn ──> under way ──> ended            never stopped halfway; dropped only before it has begun
    lease     copied while it is held; when it ends, the copies that are under way still read its blocks, so its end is reported after them
    withdrawn by the engine: the blocks are gone already, so nothing is reported; what is under way ends as nobody's, and counts for nobody

A reader that was offered a piece reads what it was offered; any other reads all, and is told when all is there.
"""

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from kvferry.protocol.actions import Expose
from kvferry.protocol.copy_turns import CopyTurns
from kvferry.protocol.leases import EndedLease
from kvferry.protocol.tickets import HOLE
from kvferry.types import RequestId, Route

__all__ = ["BlockTables", "Copied", "Exposures", "Publication"]

BlockTables = tuple[tuple[int, ...], ...]
"""By group."""


@dataclass(frozen=True, slots=True)
class Publication:
    """What may be offered of a lease."""

    handover: str
    ticket: str
    ready_tokens: int


@dataclass(frozen=True, slots=True)
class Copied:
    """What the end of a copy brings about."""

    request: RequestId
    publication: Publication | None = None
    """May be offered now."""
    readers: Mapping[str, Route] = field(default_factory=dict)
    """They are to be told: that all is there or, if it failed, why it will not be."""
    end: EndedLease | None = None
    """To be reported."""
    failure: str = ""
    is_open: bool = False
    """Of what has failed: the engine goes on with it."""
    handover: str = ""
    """Likewise, as far as it was published."""


@dataclass(slots=True)
class _Exposure:
    """One lease, until all of it is copied."""

    request: RequestId
    is_streamed: bool
    is_open: bool
    """There is more to come."""
    copies: dict[int, BlockTables] = field(default_factory=dict)
    """Under way or waiting for their turn."""
    publications: deque[tuple[int, Publication]] = field(default_factory=deque)
    """Behind the last copy that each waits for."""
    waiting: dict[str, Route] = field(default_factory=dict)
    """Readers to be told when all is there."""
    handover: str = ""
    failure: str = ""
    """Why it is no good."""
    end: EndedLease | None = None
    """How the lease has ended meanwhile."""


class Exposures:
    def __init__(self) -> None:
        self._exposures: dict[RequestId, _Exposure] = {}
        self._owners: dict[int, _Exposure] = {}
        """By copy. One that is under way for what was withdrawn has none."""
        self._turns = CopyTurns()
        self._last_copy = 0
        self._actions: list[Expose] = []

    @property
    def num_unreported(self) -> int:
        """Leases that have ended, whose blocks are still copied."""
        return sum(exposure.end is not None for exposure in self._exposures.values())

    def is_copying(self, blocks: Collection[int]) -> bool:
        """Whether one of these blocks is being copied, or will be."""
        return self._turns.has_any(blocks)

    # -- what the engine does with a lease --------------------------------------------------------------------------

    def grant(self, request: RequestId, blocks: BlockTables) -> None:
        self._exposures[request] = exposure = _Exposure(request, is_streamed=False, is_open=False)
        self._order(exposure, blocks)

    def open(self, request: RequestId) -> None:
        self._exposures[request] = _Exposure(request, is_streamed=True, is_open=True)

    def close(self, request: RequestId, blocks: BlockTables) -> None:
        """These are the last."""
        exposure = self._exposures.get(request)
        if exposure is not None:
            exposure.is_open = False
            self._order(exposure, blocks)

    def publish(self, request: RequestId, publication: Publication, blocks: BlockTables) -> Publication | None:
        """So much may be offered once these blocks, and those before, are copied. Returns it if that is now."""
        exposure = self._exposures.get(request)
        if exposure is None or not exposure.is_streamed:
            return publication
        exposure.handover = publication.handover
        if exposure.failure:
            return None
        if blocks:
            self._order(exposure, blocks)
        if not exposure.copies:
            return publication
        exposure.publications.append((self._last_copy, publication))
        return None

    def withdraw(self, request: RequestId) -> None:
        """The engine has taken the blocks back. Nobody hears of what is copied of them."""
        exposure = self._exposures.pop(request, None)
        if exposure is not None:
            self._drop_waiting(exposure)
            for copy in exposure.copies:
                del self._owners[copy]

    def end(self, ended: EndedLease) -> bool:
        """A lease has ended. Whether that may be reported now; if not, `copied` says when."""
        exposure = self._exposures.get(ended.request)
        if exposure is None:
            return True
        self._drop_waiting(exposure)
        if exposure.copies:
            exposure.end = ended
            return False
        del self._exposures[ended.request]
        return True

    def failure_of(self, request: RequestId) -> str:
        """Why a lease is no good; empty: it is."""
        exposure = self._exposures.get(request)
        return "" if exposure is None else exposure.failure

    # -- readers ----------------------------------------------------------------------------------------------------

    def attach(self, request: RequestId, reader: str, route: Route, *, is_offered: bool) -> bool:
        """Whether it may read; if not, it is told later."""
        exposure = self._exposures.get(request)
        if exposure is None or (exposure.is_streamed and is_offered):
            return True
        exposure.waiting[reader] = route
        return False

    def offer(self, request: RequestId, reader: str) -> bool:
        """It is offered what is published. Whether it waits to be told that it may read."""
        exposure = self._exposures.get(request)
        return exposure is not None and exposure.is_streamed and exposure.waiting.pop(reader, None) is not None

    def leave(self, request: RequestId, reader: str) -> None:
        if request in self._exposures:
            self._exposures[request].waiting.pop(reader, None)

    def is_waiting(self, request: RequestId, reader: str) -> bool:
        return request in self._exposures and reader in self._exposures[request].waiting

    # -- copies -----------------------------------------------------------------------------------------------------

    def copied(self, copy: int, error: str | None) -> Copied | None:
        """A copy has ended; it no longer reads the engine's blocks. None: nothing comes of it."""
        self._begin(self._turns.leave(copy))
        exposure = self._owners.pop(copy, None)
        if exposure is None:
            return None
        del exposure.copies[copy]
        if exposure.end is not None:
            return None if exposure.copies else Copied(exposure.request, end=self._exposures.pop(exposure.request).end)
        if exposure.failure:
            return None
        if error is not None:
            exposure.failure = f"the blocks could not be copied to the host buffer: {error}"
            readers = exposure.waiting
            self._drop_waiting(exposure)
            return Copied(exposure.request, None, readers, None, exposure.failure, exposure.is_open, exposure.handover)
        return self._progress(exposure)

    def take_actions(self) -> list[Expose]:
        actions, self._actions = self._actions, []
        return actions

    def _progress(self, exposure: _Exposure) -> Copied:
        publication, readers = None, {}
        oldest = min(exposure.copies, default=self._last_copy + 1)
        while exposure.publications and exposure.publications[0][0] < oldest:
            _, publication = exposure.publications.popleft()
        if not exposure.copies and not exposure.is_open:
            readers = exposure.waiting
            del self._exposures[exposure.request]
        return Copied(exposure.request, publication, readers)

    def _order(self, exposure: _Exposure, blocks: BlockTables) -> None:
        self._last_copy += 1
        exposure.copies[self._last_copy] = blocks
        self._owners[self._last_copy] = exposure
        if self._turns.join(self._last_copy, {block for group in blocks for block in group if block != HOLE}):
            self._begin([self._last_copy])

    def _begin(self, copies: list[int]) -> None:
        for copy in copies:
            exposure = self._owners[copy]
            self._actions.append(Expose(exposure.request, exposure.copies[copy], copy))

    def _drop_waiting(self, exposure: _Exposure) -> None:
        """Everybody and everything that waits for this lease's blocks to be copied."""
        exposure.publications.clear()
        exposure.waiting = {}
        # The latest first, so that none of ours begins instead.
        for copy in [copy for copy in reversed(exposure.copies) if not self._turns.is_under_way(copy)]:
            del exposure.copies[copy], self._owners[copy]
            self._begin(self._turns.leave(copy))
