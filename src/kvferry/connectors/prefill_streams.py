"""Prefills that are handed over while they are computed: how far each has come, and when it has to start again. Pure.

A prefill's full blocks are published as soon as the step that filled them is over, while the next one computes. One that the engine
preempts loses its blocks: what was published is withdrawn, before anything else is written into them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from kvferry.connectors.contract import KVCacheGroup, Request, RequestStatus, ScheduledSlice
from kvferry.protocol.fingerprints import Fingerprint, fingerprint
from kvferry.protocol.tickets import HOLE
from kvferry.types import RequestId

__all__ = ["PrefillStream", "PrefillStreams", "StreamAdvance"]


@dataclass(slots=True)
class PrefillStream:
    request: Request
    match_id: str
    tokens: Fingerprint
    """Of the whole prompt."""
    serial: int = 0
    """0: nothing is published."""
    num_published: int = 0
    blocks: Sequence[Sequence[int]] = ()
    """Tables of what is published."""


@dataclass(frozen=True, slots=True)
class StreamAdvance:
    """There is more of a prefill than was published."""

    stream: PrefillStream
    num_tokens: int
    blocks: tuple[tuple[int, ...], ...]
    """Tables of the whole prompt, with holes for what is yet to come, and for what its last token does not look at."""

    def new_blocks(self, block_size: int) -> tuple[tuple[int, ...], ...]:
        first, end = self.stream.num_published // block_size, self.num_tokens // block_size
        return tuple(table[first:end] for table in self.blocks)


@dataclass(slots=True)
class PrefillStreams:
    block_size: int
    groups: Sequence[KVCacheGroup]
    _streams: dict[RequestId, PrefillStream] = field(default_factory=dict, init=False)
    _published: dict[RequestId, PrefillStream] = field(default_factory=dict, init=False)

    def __len__(self) -> int:
        return len(self._streams)

    def add(self, request: Request, match_id: str) -> None:
        tokens = fingerprint(request.prompt_token_ids, self.block_size, request.cache_salt)
        self._streams[RequestId(request.request_id)] = PrefillStream(request, match_id, tokens)

    def get(self, request: RequestId) -> PrefillStream | None:
        return self._streams.get(request)

    def end(self, request: RequestId) -> PrefillStream | None:
        """It is computed, or will never be."""
        self._published.pop(request, None)
        return self._streams.pop(request, None)

    def take_preempted(self, slices: Iterable[ScheduledSlice]) -> list[PrefillStream]:
        """Those that have lost what was published of them, as their counts or this step's tables tell. They may be published anew."""
        tables = {scheduled.request_id: scheduled for scheduled in slices if scheduled.request_id in self._published}
        lost = []
        for request, stream in self._published.items():
            scheduled = tables.get(request)
            if _has_lost_tokens(stream) or (scheduled is not None and self.has_lost_blocks(stream, scheduled.block_ids)):
                lost.append(stream)
        for stream in lost:
            del self._published[RequestId(stream.request.request_id)]
        return lost

    def advances(self, slices: Iterable[ScheduledSlice]) -> list[StreamAdvance]:
        """What earlier steps have filled of the requests that this one goes on with."""
        found = []
        for scheduled in slices:
            stream = self._streams.get(RequestId(scheduled.request_id))
            num_tokens = scheduled.start // self.block_size * self.block_size
            if stream is not None and num_tokens > stream.num_published and scheduled.start < stream.request.num_prompt_tokens:
                found.append(
                    StreamAdvance(stream, num_tokens, self._padded(scheduled.block_ids, num_tokens, stream.request.num_prompt_tokens))
                )
        return found

    def note_published(self, advance: StreamAdvance, serial: int) -> None:
        stream = advance.stream
        stream.serial, stream.num_published, stream.blocks = serial, advance.num_tokens, advance.blocks
        self._published[RequestId(stream.request.request_id)] = stream

    def has_lost_blocks(self, stream: PrefillStream, blocks: Sequence[Sequence[int]]) -> bool:
        """Whether the engine no longer holds a block that was published.
        A request that was preempted and taken up again at once may have as many tokens as before, but in other blocks."""
        return any(
            any(was not in (HOLE, now) for was, now in zip_longest(before, after, fillvalue=HOLE))
            for before, after in zip(stream.blocks, blocks, strict=True)
        )

    def unpublished(self, stream: PrefillStream, blocks: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
        """What the engine holds at the end beyond that."""
        return tuple(
            tuple(now for was, now in zip_longest(before[: len(after)], after, fillvalue=HOLE) if now not in (HOLE, was))
            for before, after in zip(stream.blocks, blocks, strict=True)
        )

    def _padded(self, tables: Sequence[Sequence[int]], num_tokens: int, num_prompt_tokens: int) -> tuple[tuple[int, ...], ...]:
        """The engine lets go of what the last token does not look at, when it likes: whoever read that would not hear of it."""
        ready, total = num_tokens // self.block_size, -(-num_prompt_tokens // self.block_size)
        firsts = [min(ready, group.first_visible_token(num_prompt_tokens - 1) // self.block_size) for group in self.groups]
        return tuple((*[HOLE] * first, *table[first:ready], *[HOLE] * (total - ready)) for first, table in zip(firsts, tables, strict=True))


def _has_lost_tokens(stream: PrefillStream) -> bool:
    return stream.request.status is RequestStatus.PREEMPTED or stream.request.num_computed_tokens < stream.num_published
