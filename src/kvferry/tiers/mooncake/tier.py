"""Objects in a Mooncake Store, the memory that many hosts lend to one cache.

    <namespace: 32 hex digits>/<key: 64 hex digits>     the name of an object

The store bounds itself: its master evicts what was not read for the longest time. Mooncake checks
no bytes and no names of callers: every process that reaches the store can read and replace objects,
so only the MAC of the envelope says what may be used. The bytes that the network writes to are
copied before they are checked.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from kvferry.tiers.backoff import StorageFailed, StorageHealth, StorageNotAsked
from kvferry.tiers.base import (
    EntryKey,
    LoadOutcome,
    LoadResult,
    StoreOutcome,
    StoreResult,
    TierUsage,
)
from kvferry.tiers.envelope import HEADER_BYTES, Envelope, Refusal
from kvferry.tiers.keys import Namespace
from kvferry.tiers.mooncake.agent import Call, MooncakePlace, Operation
from kvferry.tiers.mooncake.agent_process import AgentProcess, Lane
from kvferry.transports.mooncake.process import AgentFailed

TOLERATED_FAILURES = 2
MAX_NAMES = 512
"""The most names of one call, which must be smaller than the buffer of a channel."""

# Codes of Mooncake.
NO_ROOM = -200
TOO_SMALL = -600
"""Of a read: the object is larger than the memory for it."""
BEING_WRITTEN = -703
EXISTS = -705
TRANSFER_FAILED = -800
MISSING = frozenset({BEING_WRITTEN, -704, -707, -710, -712})
"""No object, none yet, or evicted during the call."""
PRESENT = frozenset({BEING_WRITTEN, EXISTS})
STORES_FAIL = frozenset({NO_ROOM, TRANSFER_FAILED})
"""Of a write. Loads go on: other hosts hold other objects."""
_SENTENCES = {
    NO_ROOM: "the Mooncake store has no room",
    TRANSFER_FAILED: "a host that lends memory to the Mooncake store cannot be reached",
    -900: "the Mooncake master cannot be reached",
    -901: "the Mooncake master did not answer in time",
}

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class MooncakeDeadlines:
    lookup_s: float = 2.0
    """For `find` and `find_prefix` as a whole."""
    transfer_s: float = 10.0
    """For one load or one store as a whole."""


class MooncakeTier:
    """Implements `Tier`. A process of its own makes the calls; see `agent.py`."""

    def __init__(
        self,
        place: MooncakePlace,
        namespace: Namespace,
        secret: bytes,
        deadlines: MooncakeDeadlines | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises `MissingDependency` if Mooncake is not installed. Waits for no other host."""
        self._agent = AgentProcess(place)
        self._namespace = namespace
        self._envelope = Envelope(secret, namespace.digest)
        self._deadlines = deadlines or MooncakeDeadlines()
        self._asking = StorageHealth(clock, TOLERATED_FAILURES)
        self._storing = StorageHealth(clock, TOLERATED_FAILURES)
        """Of stores alone: a store without room still has objects to load."""
        self._usage = TierUsage()
        self._usage_lock = threading.Lock()

    @property
    def name(self) -> str:
        return "mooncake"

    def find(self, keys: Sequence[EntryKey]) -> list[bool]:
        return [is_found for found in self._find(keys) for is_found in found]

    def find_prefix(self, keys: Sequence[EntryKey]) -> int:
        count = 0
        for found in self._find(keys):
            if False in found:
                return count + found.index(False)
            count += len(found)
        return count

    def load(self, key: EntryKey, into: memoryview) -> LoadResult:
        until = time.monotonic() + self._deadlines.transfer_s
        wanted_bytes = HEADER_BYTES + len(into)
        call = Call(Operation.GET, [self._object_name(key)], wanted_bytes)
        size = Call(Operation.SIZE, [self._object_name(key)])

        def get(lane: Lane) -> LoadResult:
            memory = lane.memory(wanted_bytes)
            [stored_bytes] = _checked(lane.call(call, until), MISSING | {TOO_SMALL})
            if stored_bytes in MISSING:
                return LoadResult(LoadOutcome.MISSING)
            if stored_bytes == TOO_SMALL:
                # Mooncake has this code for other mistakes too.
                [size_bytes] = _checked(lane.call(size, until), MISSING)
                if size_bytes == wanted_bytes:
                    raise StorageFailed(_sentence(TOO_SMALL))
                return _refused(Refusal.OTHER_LENGTH)
            # Peers may write to `memory` at any time, but not to the copies, which are checked.
            header = memoryview(bytes(memory[: min(stored_bytes, HEADER_BYTES)]))
            if stored_bytes == wanted_bytes:
                _copy(memory[HEADER_BYTES:], into)
            refusal = self._envelope.check(key, header, into, stored_bytes)
            return LoadResult(LoadOutcome.LOADED) if refusal is None else _refused(refusal)

        try:
            result = self._with_lane(get, until)
        except StorageFailed as failure:
            return LoadResult(LoadOutcome.FAILED, str(failure))
        if result.outcome is LoadOutcome.REFUSED:
            self.remove([key])
        return result

    def store(self, key: EntryKey, payload: memoryview) -> StoreResult:
        try:
            self._storing.check()
            code = self._write(key, payload)
        except StorageNotAsked as pause:
            return StoreResult(StoreOutcome.DROPPED, str(pause))
        except StorageFailed as failure:
            return StoreResult(StoreOutcome.FAILED, str(failure))
        if code in STORES_FAIL:
            self._storing.failed(_sentence(code))
            outcome = StoreOutcome.DROPPED if code == NO_ROOM else StoreOutcome.FAILED
            return StoreResult(outcome, _sentence(code))
        self._storing.succeeded()
        return StoreResult(StoreOutcome.PRESENT if code in PRESENT else StoreOutcome.STORED)

    def remove(self, keys: Sequence[EntryKey]) -> None:
        until = time.monotonic() + self._deadlines.transfer_s
        with suppress(StorageFailed):
            for names in self._names(keys):
                self._ask(Call(Operation.REMOVE, names), until)

    def usage(self) -> TierUsage:
        """What this process has stored; the contents of the store are not counted."""
        return self._usage

    def close(self) -> None:
        self._agent.close()

    def _object_name(self, key: EntryKey) -> str:
        return f"{self._namespace.hex}/{key.hex()}"

    def _names(self, keys: Sequence[EntryKey]) -> Iterator[list[str]]:
        """The names of objects, as many at a time as fit into a call."""
        for start in range(0, len(keys), MAX_NAMES):
            yield [self._object_name(key) for key in keys[start : start + MAX_NAMES]]

    def _find(self, keys: Sequence[EntryKey]) -> Iterator[list[bool]]:
        until = time.monotonic() + self._deadlines.lookup_s
        for names in self._names(keys):
            yield [code == 1 for code in self._ask(Call(Operation.FIND, names), until)]

    def _write(self, key: EntryKey, payload: memoryview) -> int:
        """Write one object, unless it is there. 0, or a code of `PRESENT` or `STORES_FAIL`."""
        until = time.monotonic() + self._deadlines.transfer_s
        name, size_bytes = self._object_name(key), HEADER_BYTES + len(payload)
        # Mooncake answers a write of an object that exists as if it had written it.
        [stored_bytes] = self._ask(Call(Operation.SIZE, [name]), until)
        if stored_bytes == size_bytes:
            return EXISTS
        if stored_bytes not in MISSING:
            self._ask(Call(Operation.REMOVE, [name]), until)
        header = self._envelope.seal(key, payload)

        def put(lane: Lane) -> int:
            memory = lane.memory(size_bytes)
            memory[:HEADER_BYTES] = header
            _copy(payload, memory[HEADER_BYTES:])
            answer = lane.call(Call(Operation.PUT, [name], size_bytes), until)
            return _checked(answer, PRESENT | STORES_FAIL)[0]

        code = self._with_lane(put, until)
        if code == 0:
            with self._usage_lock:
                self._usage = TierUsage(
                    self._usage.used_bytes + size_bytes, self._usage.num_entries + 1
                )
        return code

    def _ask(self, call: Call, until: float) -> list[int]:
        return self._with_lane(lambda lane: _checked(lane.call(call, until), MISSING), until)

    def _with_lane(self, use: Callable[[Lane], T], until: float) -> T:
        """Use one lane, unless Mooncake has failed some seconds ago. Raises `StorageFailed`."""
        self._asking.check()
        try:
            with self._agent.lane(until) as lane:
                answer = use(lane)
        except (AgentFailed, StorageFailed, OSError) as failure:
            self._asking.failed(str(failure))
            raise StorageFailed(str(failure)) from None
        self._asking.succeeded()
        return answer


def _checked(answer: list[int], allowed: frozenset[int]) -> list[int]:
    if not answer:
        raise StorageFailed("the Mooncake master cannot be reached")
    for code in answer:
        if code < 0 and code not in allowed:
            raise StorageFailed(_sentence(code))
    return answer


def _refused(refusal: Refusal) -> LoadResult:
    return LoadResult(LoadOutcome.REFUSED, f"the object in the Mooncake store {refusal.value}")


def _sentence(code: int) -> str:
    return _SENTENCES.get(code, f"Mooncake answered with code {code}")


def _copy(source: memoryview, target: memoryview) -> None:
    # numpy copies without the GIL.
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
