"""Push, as a part of the connector's scheduler, and the streams of prefill legs that are published
while the engine computes them.

`PrefillStreams` is pure: it records how far each prefill leg is published and detects when a leg
must be published again. The full blocks of a prefill leg are published as soon as the step that
filled the blocks is over, while the next step computes. A request that the engine preempts loses
its blocks, so the stream is withdrawn before the engine writes other KV into those blocks.

`PushMode` runs on the engine's main thread and never blocks. The protocol is described in
docs/decisions/030-push.md.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from kvferry.config import NixlExtraConfig
from kvferry.connectors.contract import (
    ConnectorConfig,
    KVCacheConfig,
    KVCacheGroup,
    Request,
    RequestStatus,
    ScheduledSlice,
)
from kvferry.connectors.nixl.params import LoadFromPeer, PrefillForPeer, UnsignedPeer
from kvferry.connectors.nixl.tables import LoadOffer, SharedTicketKey
from kvferry.connectors.nixl.transfer_mode import (
    LeaseGrant,
    LoadByTicket,
    LoadDecision,
    LoadPlan,
    LoadRefusal,
    TicketIssuer,
)
from kvferry.errors import InvalidTicket
from kvferry.protocol.consumer.transfer import PushInfo
from kvferry.protocol.fingerprints import Fingerprint, fingerprint
from kvferry.protocol.peers import UNKNOWN_EPOCH
from kvferry.protocol.tickets import HOLE, MAX_TICKET_NAME_CHARS, PushTicketKey, Ticket
from kvferry.types import EngineId, EngineIncarnation, RequestId
from kvferry.worker.commands import (
    AbandonLease,
    CloseStream,
    ExpectPrefill,
    FailPush,
    OpenStream,
    PublishTicket,
    RegisterForPush,
    SkipLoad,
    WithdrawStream,
    WorkerCommand,
)


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
        """Publish a prefill leg from now on, unless its KV must not be exchanged."""
        if (salt := request.cache_salt) is not None:
            tokens = fingerprint(request.prompt_token_ids, self.block_size, salt)
            self._streams[RequestId(request.request_id)] = PrefillStream(request, match_id, tokens)

    def get(self, request: RequestId) -> PrefillStream | None:
        return self._streams.get(request)

    def end(self, request: RequestId) -> PrefillStream | None:
        """Remove a stream whose prefill leg has finished or will never finish."""
        self._published.pop(request, None)
        return self._streams.pop(request, None)

    def clear(self) -> list[PrefillStream]:
        """Remove and return all streams."""
        streams = list(self._streams.values())
        self._streams.clear()
        self._published.clear()
        return streams

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
            num_tokens = scheduled.num_written // self.block_size * self.block_size
            if (
                stream is not None
                and num_tokens > stream.num_published
                and scheduled.num_written < stream.request.num_prompt_tokens
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
        those blocks at any time, and a reader would not notice that the contents changed. The
        states are holes too: they change until the prefill leg ends.
        """
        ready, total = num_tokens // self.block_size, -(-num_prompt_tokens // self.block_size)
        firsts = [
            ready
            if group.is_state
            else min(ready, group.first_visible_token(num_prompt_tokens - 1) // self.block_size)
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


# -- push mode --
# Unlike in pull, a decode leg may arrive before any block is computed.
#
# As a consumer, the mode treats a router's push ticket, or the name of a trusted prefill side, as
# covering the whole prompt: the transfer workers register for the prefill leg and compare the
# offered fingerprint with the prompt before they read. As a producer, the mode has the transfer
# workers publish every prefill leg, block by block while the engine computes, to the decode side
# that registers. The scheduler also returns the ticket at the end, so a router that calls the
# prefill side first is served as in pull.


# Bounds the memory for match ids whose prefill leg never arrives; the oldest is forgotten first.
MAX_DECLINED = 10_000


class PushMode:
    """The decode side registers for a prefill leg before it has finished. A `TransferMode`."""

    def __init__(
        self,
        config: ConnectorConfig,
        cache: KVCacheConfig,
        extra: NixlExtraConfig,
        issuer: TicketIssuer,
    ) -> None:
        self._config = config
        self._cache = cache
        self._extra = extra
        self._issuer = issuer
        self._push_key = PushTicketKey(config.secret)
        self._streams = PrefillStreams(cache.block_size, cache.groups)
        self._published: dict[str, RequestId] = {}
        """Finished prefill legs whose blocks are held, by match id."""
        self._match_ids: dict[RequestId, str] = {}
        """The match ids of the legs in `_published`."""
        self._declined_match_ids: OrderedDict[str, None] = OrderedDict()
        """Match ids whose two legs both run on this engine, because a router chose this engine for
        both.
        """

    # -- consumer --

    def plan_load(self, request: Request, role: LoadFromPeer) -> LoadDecision:
        if role.push_ticket is None:
            if role.ticket is None and role.unsigned_peer is not None and self._extra.peers:
                return self._plan_load_from(request, role.unsigned_peer)
            return LoadByTicket(role.ticket)
        try:
            ticket = self._push_key.open(role.push_ticket)
        except InvalidTicket as error:
            return LoadRefusal(str(error))
        if ticket.engine == self._config.kv_transfer.engine_id:
            return LoadPlan(self._decline(ticket.match_id))
        command = RegisterForPush(
            RequestId(request.request_id),
            ticket.incarnation,
            ticket.address,
            ticket.tp_size,
            self._push_info(request, ticket.match_id, str(role.push_ticket)),
        )
        return self._expect(request, command, (ticket.engine, ticket.epoch, ticket.match_id))

    def _plan_load_from(self, request: Request, peer: UnsignedPeer) -> LoadDecision:
        """Register with a prefill side that a router named without a signature. The name is trusted
        only if the address is listed in `peers`.
        """
        if (
            peer.engine == self._config.kv_transfer.engine_id
            or peer.address == self._issuer.address
        ):
            # Both legs run on this engine: the blocks are in its own prefix cache, and an engine
            # never connects to itself.
            return LoadPlan()
        if str(peer.address) not in self._extra.peer_addresses:
            return LoadRefusal(
                f"the request has no ticket, and {peer.address} is not among this engine's `peers`;"
                " add the address to `peers`, or use a router that signs push tickets"
            )
        if len(request.request_id) > MAX_TICKET_NAME_CHARS:
            return LoadRefusal(
                f"the request has no ticket, and its id is longer than {MAX_TICKET_NAME_CHARS} "
                "characters; shorten the id, or use a router that signs push tickets"
            )
        command = RegisterForPush(
            RequestId(request.request_id),
            EngineIncarnation(EngineId(peer.engine), UNKNOWN_EPOCH),
            peer.address,
            peer.tp_size,
            self._push_info(request, "", ""),
        )
        return self._expect(request, command, None)

    def _push_info(self, request: Request, match_id: str, push_ticket: str) -> PushInfo:
        assert self._issuer.address is not None
        return PushInfo(match_id, self._fingerprint(request), self._issuer.address, push_ticket)

    def _fingerprint(self, request: Request) -> Fingerprint:
        salt, size = request.cache_salt, self._cache.block_size
        tokens = request.prompt_token_ids
        if self._cache.has_states:
            # The prefill side computes one token less.
            tokens = tokens[:-1]
        # A fingerprint of no tokens shares no prefix with any other.
        return fingerprint(() if salt is None else tokens, size, salt or "")

    def _expect(
        self,
        request: Request,
        command: RegisterForPush,
        shared: SharedTicketKey | None,
    ) -> LoadPlan:
        """Register and offer the whole prompt to the engine. `shared` identifies the prefill leg
        among the requests that wait for the same leg.
        """
        # With local attention or states the offer must leave out the last token, which the engine
        # computes itself: see `NixlConnectorScheduler._usable`.
        num_tokens = request.num_prompt_tokens - self._cache.leaves_last_token
        if command.push_info.tokens.num_tokens == 0 or self._producer_frees_last_window(num_tokens):
            # This engine computes the prompt; the registration and `SkipLoad` let the prefill side
            # free the blocks.
            return LoadPlan((command, SkipLoad(RequestId(request.request_id))))
        return LoadPlan((command,), LoadOffer(num_tokens, shared))

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

    def _decline(self, match_id: str) -> tuple[AbandonLease, ...]:
        """Drop a match whose two legs both run on this engine: the blocks are in its own prefix
        cache, and an engine never connects to itself.
        """
        held = self._published.get(match_id)
        if held is not None:
            return (AbandonLease(held),)
        # The prefill leg has not finished yet; `finish_prefill_leg` abandons the lease.
        self._declined_match_ids[match_id] = None
        if len(self._declined_match_ids) > MAX_DECLINED:
            self._declined_match_ids.popitem(last=False)
        return ()

    # -- producer --

    def announce_prefill_leg(self, request: Request, role: PrefillForPeer) -> list[WorkerCommand]:
        return [ExpectPrefill(RequestId(request.request_id), self._match_id(role))]

    def add_prefill_leg(self, request: Request, role: PrefillForPeer) -> list[WorkerCommand]:
        if (
            self._extra.push_streaming
            and self._config.kv_transfer.is_kv_producer
            and self._issuer.address is not None
            and len(request.request_id) <= MAX_TICKET_NAME_CHARS
        ):
            self._streams.add(request, self._match_id(role))
        return self.announce_prefill_leg(request, role)

    def needs_slices(self, request: RequestId) -> bool:
        return self._streams.get(request) is not None

    def step_commands(self, slices: Iterable[ScheduledSlice]) -> list[WorkerCommand]:
        """Withdraw the streams whose blocks the engine has taken away, and publish the blocks that
        earlier steps have filled.
        """
        slices = tuple(slices)
        commands: list[WorkerCommand] = []
        # Withdraw before publishing: a resumed request may already have new blocks in this step.
        for stream in self._streams.take_preempted(slices):
            commands.append(WithdrawStream(RequestId(stream.request.request_id), stream.serial))
            stream.serial = stream.num_published = 0
        for advance in self._streams.advances(slices):
            commands += self._publish(advance)
        return commands

    def _publish(self, advance: StreamAdvance) -> list[WorkerCommand]:
        stream, request_id = advance.stream, RequestId(advance.stream.request.request_id)
        commands: list[WorkerCommand] = []
        serial = stream.serial
        if not serial:
            serial = self._issuer.next_serial()
            commands.append(OpenStream(request_id, serial))
        ticket = self._issuer.ticket(stream.request, serial, advance.blocks, stream.tokens)
        copied = advance.new_blocks(self._cache.block_size) if self._issuer.uses_host_buffer else ()
        text = self._issuer.key.sign(ticket)
        commands.append(
            PublishTicket(request_id, stream.match_id, text, advance.num_tokens, copied)
        )
        self._streams.note_published(advance, serial)
        return commands

    def grant_lease(self, request: RequestId, blocks: Sequence[Sequence[int]]) -> LeaseGrant:
        stream = self._streams.get(request)
        if stream is None or not stream.serial:
            return self._issuer.grant_lease(request, blocks)
        # Preempted and resumed since the last publication: the published blocks may hold
        # other KV by now.
        if self._streams.has_lost_blocks(stream, blocks):
            grant = self._issuer.grant_lease(request, blocks)
            withdraw = WithdrawStream(request, stream.serial)
            return LeaseGrant(grant.serial, (withdraw, *grant.commands))
        uses_host_buffer = self._issuer.uses_host_buffer
        copied = self._streams.unpublished(stream, blocks) if uses_host_buffer else ()
        return LeaseGrant(stream.serial, (CloseStream(request, copied),))

    def ticket_params(self, ticket: Ticket) -> dict[str, Any]:
        """A pull ticket, because no D may have registered. `remote_epoch` tells kvferry's router
        that this engine pushes.

        vllm-router reads `transfer_mode`: if it is push, the router sends D parameters of its own,
        which lack the ticket and are of use only if the engines list each other in `peers`.
        """
        params = {**self._issuer.ticket_params(ticket), "remote_epoch": ticket.epoch}
        return params | {"transfer_mode": "push"} if self._extra.peers else params

    def finish_prefill_leg(
        self, request: Request, role: PrefillForPeer, params: Mapping[str, Any] | None
    ) -> list[WorkerCommand]:
        request_id, match_id = RequestId(request.request_id), self._match_id(role)
        self._streams.end(request_id)
        if params is None:
            reason = (
                "the prefill side holds no blocks for this request: the prefill leg ended as "
                f"{request.status.name.lower()}"
                if request.cache_salt is not None
                else "the prefill side does not exchange the KV of this request; its log says why"
            )
            return [FailPush(request_id, match_id, reason)]
        if match_id in self._declined_match_ids:
            del self._declined_match_ids[match_id]
            return [AbandonLease(request_id)]
        if match_id:
            self._published[match_id], self._match_ids[request_id] = request_id, match_id
        num_tokens = params["remote_num_tokens"]
        return [PublishTicket(request_id, match_id, params["ticket"], num_tokens)]

    def end_lease(self, request: RequestId) -> None:
        self._published.pop(self._match_ids.pop(request, ""), None)

    def drop_prefill_legs(self, reason: str) -> list[WorkerCommand]:
        return [
            FailPush(RequestId(stream.request.request_id), stream.match_id, reason)
            for stream in self._streams.clear()
        ]

    def _match_id(self, role: PrefillForPeer) -> str:
        """The match id of a valid push ticket. Empty without a valid ticket: then the legs are
        matched by their request ids.
        """
        try:
            return self._push_key.open(role.push_ticket).match_id
        except InvalidTicket:
            return ""
