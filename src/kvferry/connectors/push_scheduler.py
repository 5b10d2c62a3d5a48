"""The push connector's scheduler half, and the streams of prefill legs that are transferred while
they are computed.

`PrefillStreams` is pure: it records how far each prefill leg is published and detects when a leg
must be published again. The full blocks of a prefill leg are published as soon as the step that
filled the blocks is over, while the next step computes. A request that the engine preempts loses
its blocks, so the stream is withdrawn before the engine writes other KV into those blocks.

`NixlPushConnectorScheduler` runs on the engine's main thread and never blocks. The protocol is
described in docs/decisions/030-push.md.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from kvferry.config import NixlExtraConfig
from kvferry.connectors.contract import (
    ConnectorConfig,
    KVCacheConfig,
    KVCacheGroup,
    KVConnectorOutput,
    Request,
    RequestStatus,
    ScheduledSlice,
)
from kvferry.connectors.metadata import NixlConnectorMetadata
from kvferry.connectors.params import LoadFromPeer, PrefillForPeer, UnsignedPeer, read_params
from kvferry.connectors.scheduler import NixlConnectorScheduler
from kvferry.connectors.scheduler_tables import LoadOffer, SharedTicketKey
from kvferry.errors import InvalidTicket
from kvferry.protocol.fingerprints import Fingerprint, fingerprint
from kvferry.protocol.tickets import HOLE, MAX_TICKET_NAME_CHARS, PushTicketKey, Ticket
from kvferry.types import Address, RequestId
from kvferry.worker.commands import (
    AbandonLease,
    CloseStream,
    FailPush,
    OpenStream,
    PublishTicket,
    RegisterForPush,
    RegisterForPushByAddress,
    SkipLoad,
    WithdrawStream,
)

__all__ = ["NixlPushConnectorScheduler", "PrefillStream", "PrefillStreams", "StreamAdvance"]


@dataclass(slots=True)
class PrefillStream:
    """One prefill leg that is published while the engine computes it."""

    request: Request
    match_id: str
    tokens: Fingerprint
    """The fingerprint of the whole prompt."""
    serial: int = 0
    """The serial of the published ticket; 0 if nothing is published."""
    num_published: int = 0
    blocks: Sequence[Sequence[int]] = ()
    """The block tables as published."""


@dataclass(frozen=True, slots=True)
class StreamAdvance:
    """A stream of which the engine has computed more tokens than were published."""

    stream: PrefillStream
    num_tokens: int
    blocks: tuple[tuple[int, ...], ...]
    """Block tables of the whole prompt. Blocks not computed yet and blocks that the last token does
    not attend to are holes.
    """

    def new_blocks(self, block_size: int) -> tuple[tuple[int, ...], ...]:
        """The blocks of each group that the last publication did not contain."""
        first, end = self.stream.num_published // block_size, self.num_tokens // block_size
        return tuple(table[first:end] for table in self.blocks)


@dataclass(slots=True)
class PrefillStreams:
    """The prefill legs that are being computed and published."""

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
        """Remove a stream whose prefill leg has finished or will never finish."""
        self._published.pop(request, None)
        return self._streams.pop(request, None)

    def take_preempted(self, slices: Iterable[ScheduledSlice]) -> list[PrefillStream]:
        """Remove and return the published streams whose blocks the engine has taken away.

        A stream is lost if the request's token count has dropped or if this step's block tables
        differ from the published tables. A lost stream may be published again.
        """
        tables = {
            scheduled.request_id: scheduled
            for scheduled in slices
            if scheduled.request_id in self._published
        }
        lost = []
        for request, stream in self._published.items():
            scheduled = tables.get(request)
            if _has_lost_tokens(stream) or (
                scheduled is not None and self.has_lost_blocks(stream, scheduled.block_ids)
            ):
                lost.append(stream)
        for stream in lost:
            del self._published[RequestId(stream.request.request_id)]
        return lost

    def advances(self, slices: Iterable[ScheduledSlice]) -> list[StreamAdvance]:
        """The blocks that earlier steps have filled, for each stream that this step continues."""
        found = []
        for scheduled in slices:
            stream = self._streams.get(RequestId(scheduled.request_id))
            # Only full blocks: the last, partial block is still being written.
            num_tokens = scheduled.start // self.block_size * self.block_size
            if (
                stream is not None
                and num_tokens > stream.num_published
                and scheduled.start < stream.request.num_prompt_tokens
            ):
                found.append(
                    StreamAdvance(
                        stream,
                        num_tokens,
                        self._padded(
                            scheduled.block_ids, num_tokens, stream.request.num_prompt_tokens
                        ),
                    )
                )
        return found

    def note_published(self, advance: StreamAdvance, serial: int) -> None:
        stream = advance.stream
        stream.serial, stream.num_published, stream.blocks = (
            serial,
            advance.num_tokens,
            advance.blocks,
        )
        self._published[RequestId(stream.request.request_id)] = stream

    def has_lost_blocks(self, stream: PrefillStream, blocks: Sequence[Sequence[int]]) -> bool:
        """Whether the engine no longer holds a published block. A request that was preempted and
        resumed at once may have as many tokens as before, but in other blocks.
        """
        return any(
            any(was not in (HOLE, now) for was, now in zip_longest(before, after, fillvalue=HOLE))
            for before, after in zip(stream.blocks, blocks, strict=True)
        )

    def unpublished(
        self, stream: PrefillStream, blocks: Sequence[Sequence[int]]
    ) -> tuple[tuple[int, ...], ...]:
        """The blocks that the engine holds at the end of the prefill leg and that were not
        published.
        """
        return tuple(
            tuple(
                now
                for was, now in zip_longest(before[: len(after)], after, fillvalue=HOLE)
                if now not in (HOLE, was)
            )
            for before, after in zip(stream.blocks, blocks, strict=True)
        )

    def _padded(
        self, tables: Sequence[Sequence[int]], num_tokens: int, num_prompt_tokens: int
    ) -> tuple[tuple[int, ...], ...]:
        """Replace the blocks that the last token does not attend to by holes: the engine may free
        those blocks at any time, and a reader would not notice that the contents changed.
        """
        ready, total = num_tokens // self.block_size, -(-num_prompt_tokens // self.block_size)
        firsts = [
            min(ready, group.first_visible_token(num_prompt_tokens - 1) // self.block_size)
            for group in self.groups
        ]
        return tuple(
            (*[HOLE] * first, *table[first:ready], *[HOLE] * (total - ready))
            for first, table in zip(firsts, tables, strict=True)
        )


def _has_lost_tokens(stream: PrefillStream) -> bool:
    return (
        stream.request.status is RequestStatus.PREEMPTED
        or stream.request.num_computed_tokens < stream.num_published
    )


# -- push scheduler --
# Like the pull scheduler, but a decode leg may arrive before any block is computed.
#
# As a consumer, the scheduler treats a router's push ticket, or the name of a trusted prefill side,
# as covering the whole prompt: the transfer workers register for the prefill leg and compare the
# offered fingerprint with the prompt before they read. As a producer, the scheduler has the
# transfer workers publish every prefill leg, block by block while the engine computes, to the
# decode side that registers. The scheduler also returns the ticket at the end, so a router that
# calls the prefill side first is served as in pull mode.


# Bounds the memory for match ids whose prefill leg never arrives; the oldest is forgotten first.
MAX_DECLINED = 10_000


class NixlPushConnectorScheduler(NixlConnectorScheduler):
    """The state and decisions of `NixlPushConnector` in the process that schedules."""

    def __init__(
        self, config: ConnectorConfig, cache: KVCacheConfig, extra: NixlExtraConfig
    ) -> None:
        super().__init__(config, cache, extra)
        self._push_key = PushTicketKey(config.secret)
        self._streams = PrefillStreams(cache.block_size, cache.groups)
        self._published: dict[str, RequestId] = {}
        """Finished prefill legs whose blocks are held, by match id."""
        self._match_ids: dict[RequestId, str] = {}
        self._declined_match_ids: OrderedDict[str, None] = OrderedDict()
        """Match ids whose two legs both run on this engine, because a router chose this engine for
        both.
        """

    def on_new_request(self, request: Request) -> None:
        super().on_new_request(request)
        role = read_params(request.kv_transfer_params)
        can_stream = (
            self._extra.push_streaming
            and self._config.kv_transfer.is_kv_producer
            and self._issuer.address is not None
        )
        if (
            isinstance(role, PrefillForPeer)
            and can_stream
            and len(request.request_id) <= MAX_TICKET_NAME_CHARS
        ):
            self._streams.add(request, self._match_id(role))

    # -- consumer --

    def _take(self, request: Request, role: LoadFromPeer) -> None:
        if role.push_ticket is None:
            if role.ticket is None and role.unsigned_peer is not None and self._extra.peers:
                self._take_unsigned_peer(request, role.unsigned_peer)
            else:
                self._take_ticket(request, role.ticket)
            return
        try:
            ticket = self._push_key.open(role.push_ticket)
        except InvalidTicket as error:
            self._refuse(request, str(error))
            return
        if ticket.engine == self._config.kv_transfer.engine_id:
            self._decline(ticket.match_id)
            return
        command = RegisterForPush(
            RequestId(request.request_id),
            str(role.push_ticket),
            self._fingerprint(request),
            self._own_address,
        )
        self._expect(request, command, (ticket.engine, ticket.epoch, ticket.match_id))

    def _take_unsigned_peer(self, request: Request, unsigned_peer: UnsignedPeer) -> None:
        """Register with a prefill side that a router named without a signature. The name is trusted
        only if the address is listed in `peers`.
        """
        if (
            unsigned_peer.engine == self._config.kv_transfer.engine_id
            or unsigned_peer.address == self._issuer.address
        ):
            # Both legs run on this engine: the blocks are in its own prefix cache, and an engine
            # never connects to itself.
            return
        if str(unsigned_peer.address) not in self._extra.peer_addresses:
            self._refuse(
                request,
                f"there is no ticket, and {unsigned_peer.address} is not among this engine's "
                "`peers`",
            )
        elif len(request.request_id) > MAX_TICKET_NAME_CHARS:
            self._refuse(
                request,
                f"there is no ticket, and the request's id is longer than {MAX_TICKET_NAME_CHARS} "
                "characters",
            )
        else:
            request_id, tokens = RequestId(request.request_id), self._fingerprint(request)
            command = RegisterForPushByAddress(
                request_id,
                unsigned_peer.engine,
                unsigned_peer.address,
                unsigned_peer.tp_size,
                tokens,
                self._own_address,
            )
            self._expect(request, command, None)

    @property
    def _own_address(self) -> Address:
        assert self._issuer.address is not None
        return self._issuer.address

    def _fingerprint(self, request: Request) -> Fingerprint:
        return fingerprint(request.prompt_token_ids, self._cache.block_size, request.cache_salt)

    def _expect(
        self,
        request: Request,
        command: RegisterForPush | RegisterForPushByAddress,
        shared: SharedTicketKey | None,
    ) -> None:
        """Command the registration and offer the whole prompt to the engine. `shared` identifies
        the prefill leg among the requests that wait for the same leg.
        """
        request_id = RequestId(request.request_id)
        # With local attention the offer must leave out the last token, which the engine computes
        # itself: see `NixlConnectorScheduler._usable`.
        has_local_attention = any(group.has_local_attention for group in self._cache.groups)
        num_tokens = request.num_prompt_tokens - has_local_attention
        self._commands.append(command)
        if self._producer_frees_last_window(num_tokens):
            # This engine computes the prompt; the registration and `SkipLoad` let the prefill side
            # free the blocks.
            self._commands.append(SkipLoad(request_id))
        else:
            self._offers[request_id] = LoadOffer(num_tokens, shared)

    def _producer_frees_last_window(self, num_tokens: int) -> bool:
        """Whether a producer configured like this engine frees, at the end of the prompt, a block
        that the token after the first `num_tokens` tokens attends to.
        """
        size = self._cache.block_size
        return not self._cache.keeps_last_token_window and any(
            group.first_visible_token(num_tokens) // size
            != group.first_visible_token(num_tokens + 1) // size
            for group in self._cache.groups
            if group.has_local_attention
        )

    def _decline(self, match_id: str) -> None:
        """Drop a match whose two legs both run on this engine: the blocks are in its own prefix
        cache, and an engine never connects to itself.
        """
        held = self._published.get(match_id)
        if held is not None:
            self._commands.append(AbandonLease(held))
            return
        # The prefill leg has not finished yet; `request_finished` abandons the lease.
        self._declined_match_ids[match_id] = None
        if len(self._declined_match_ids) > MAX_DECLINED:
            self._declined_match_ids.popitem(last=False)

    # -- producer --

    def build_connector_meta(self, slices: Iterable[ScheduledSlice] = ()) -> NixlConnectorMetadata:
        slices = tuple(slices)
        # Withdraw before publishing: a resumed request may already have new blocks in this step.
        for stream in self._streams.take_preempted(slices):
            self._commands.append(
                WithdrawStream(RequestId(stream.request.request_id), stream.serial)
            )
            stream.serial = stream.num_published = 0
        for advance in self._streams.advances(slices):
            self._publish(advance)
        return super().build_connector_meta()

    def _publish(self, advance: StreamAdvance) -> None:
        stream, request_id = advance.stream, RequestId(advance.stream.request.request_id)
        serial = stream.serial or self._open(request_id)
        ticket = self._issuer.ticket(stream.request, serial, advance.blocks, stream.tokens)
        copied = advance.new_blocks(self._cache.block_size) if self._is_staged else ()
        self._commands.append(
            PublishTicket(
                request_id, stream.match_id, self._key.sign(ticket), advance.num_tokens, copied
            )
        )
        self._streams.note_published(advance, serial)

    def _open(self, request: RequestId) -> int:
        serial = self._issuer.next_serial()
        self._commands.append(OpenStream(request, serial))
        return serial

    def _grant(self, request: RequestId, blocks: tuple[list[int], ...]) -> int:
        stream = self._streams.get(request)
        if stream is None or not stream.serial:
            return super()._grant(request, blocks)
        # Preempted and resumed since the last publication: the published blocks may hold
        # other KV by now.
        if self._streams.has_lost_blocks(stream, blocks):
            self._commands.append(WithdrawStream(request, stream.serial))
            return super()._grant(request, blocks)
        self._commands.append(
            CloseStream(
                request, self._streams.unpublished(stream, blocks) if self._is_staged else ()
            )
        )
        return stream.serial

    def request_finished(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        is_held, params = super().request_finished(request, block_ids)
        role = read_params(request.kv_transfer_params)
        if not isinstance(role, PrefillForPeer):
            return is_held, params
        request_id, match_id = RequestId(request.request_id), self._match_id(role)
        self._streams.end(request_id)
        if not is_held or params is None:
            reason = (
                "the prefill side has nothing to hand over: its request ended as "
                f"{request.status.name.lower()}"
            )
            self._commands.append(FailPush(request_id, match_id, reason))
        elif match_id in self._declined_match_ids:
            del self._declined_match_ids[match_id]
            self._commands.append(AbandonLease(request_id))
        else:
            self._commands.append(
                PublishTicket(request_id, match_id, params["ticket"], params["remote_num_tokens"])
            )
            if match_id:
                self._published[match_id], self._match_ids[request_id] = request_id, match_id
        return is_held, params

    def take_output(self, output: KVConnectorOutput) -> None:
        super().take_output(output)
        for request in output.finished_sending:
            self._published.pop(self._match_ids.pop(RequestId(request), ""), None)

    def _match_id(self, role: PrefillForPeer) -> str:
        """The match id of a valid push ticket. Empty without a valid ticket: then the legs are
        matched by their request ids.
        """
        try:
            return self._push_key.open(role.push_ticket).match_id
        except InvalidTicket:
            return ""

    def _params(self, ticket: Ticket) -> dict[str, Any]:
        return super()._params(ticket) | {"transfer_mode": "push", "remote_epoch": ticket.epoch}
