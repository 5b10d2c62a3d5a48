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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from kvferry.connectors.contract import KVCacheGroup, Request, RequestStatus, ScheduledSlice
from kvferry.connectors.nixl.params import LoadFromPeer, PrefillForPeer, UnsignedPeer
from kvferry.connectors.nixl.transfer_mode import (
    LoadOffer,
    LoadPlan,
    PullMode,
    SchedulerContext,
    SharedTicketKey,
)
from kvferry.errors import InvalidTicket
from kvferry.protocol.consumer.transfer import PushInfo
from kvferry.protocol.fingerprints import Fingerprint, fingerprint
from kvferry.protocol.peers import UNKNOWN_EPOCH
from kvferry.protocol.tickets import MAX_TICKET_NAME_CHARS, NO_BLOCK, PushTicketKey, Ticket
from kvferry.types import BlockIds, EngineId, EngineIncarnation, RequestId
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
    blocks: BlockIds = ()
    """Block tables of the whole prompt, as published. They have `NO_BLOCK` for blocks that are not
    computed yet and for blocks that the last token does not attend to.
    """

    @property
    def has_lost_tokens(self) -> bool:
        return (
            self.request.status is RequestStatus.PREEMPTED
            or self.request.num_computed_tokens < self.num_published
        )

    def has_lost_blocks(self, blocks: BlockIds) -> bool:
        """Whether the engine no longer holds a published block. A request that was preempted and
        resumed at once may have as many tokens as before, but in other blocks.
        """
        return any(
            was not in (NO_BLOCK, now)
            for before, after in zip(self.blocks, blocks, strict=True)
            for was, now in zip_longest(before, after, fillvalue=NO_BLOCK)
        )

    def unpublished(self, blocks: BlockIds) -> BlockIds:
        """The blocks that the engine holds at the end of the prefill leg and that were not
        published.
        """
        return tuple(
            tuple(
                now
                for was, now in zip_longest(before[: len(after)], after, fillvalue=NO_BLOCK)
                if now not in (NO_BLOCK, was)
            )
            for before, after in zip(self.blocks, blocks, strict=True)
        )


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

    def withdraw_lost(self, slices: Iterable[ScheduledSlice]) -> list[tuple[RequestId, int]]:
        """Withdraw the streams whose blocks the engine has taken away: the token count of the
        request has dropped, or this step's block tables differ from the published tables. Returns
        their requests and serials. A withdrawn stream may be published again.
        """
        tables = {scheduled.request_id: scheduled.block_ids for scheduled in slices}
        lost = [
            (request, stream.serial)
            for request, stream in self._published.items()
            if stream.has_lost_tokens
            or (request in tables and stream.has_lost_blocks(tables[request]))
        ]
        for request, _ in lost:
            stream = self._published.pop(request)
            stream.serial = stream.num_published = 0
        return lost

    def advance(self, slices: Iterable[ScheduledSlice]) -> Iterator[tuple[PrefillStream, BlockIds]]:
        """Publish the blocks that earlier steps have filled. Yields each stream that this step
        continues and that has new blocks, with the new blocks of each group.
        """
        for scheduled in slices:
            stream = self._streams.get(RequestId(scheduled.request_id))
            # Only full blocks: the last, partial block is still being written.
            end = scheduled.num_written // self.block_size
            if (
                stream is None
                or end * self.block_size <= stream.num_published
                or scheduled.num_written >= stream.request.num_prompt_tokens
            ):
                continue
            first = stream.num_published // self.block_size
            stream.num_published = end * self.block_size
            stream.blocks = self._padded(scheduled.block_ids, end, stream.request.num_prompt_tokens)
            self._published[RequestId(scheduled.request_id)] = stream
            yield stream, tuple(table[first:end] for table in stream.blocks)

    def _padded(self, tables: BlockIds, ready: int, num_prompt_tokens: int) -> BlockIds:
        """The first `ready` blocks without those that the last token does not attend to: the engine
        may free those blocks at any time, and a reader would not notice that the contents changed.
        Without the states too, which change until the prefill leg ends.
        """
        total = -(-num_prompt_tokens // self.block_size)
        firsts = [
            ready
            if group.is_state
            else min(ready, group.first_visible_token(num_prompt_tokens - 1) // self.block_size)
            for group in self.groups
        ]
        return tuple(
            (*[NO_BLOCK] * first, *table[first:ready], *[NO_BLOCK] * (total - ready))
            for first, table in zip(firsts, tables, strict=True)
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


class PushMode(PullMode):
    """The decode side registers for a prefill leg before it has finished."""

    def __init__(self, context: SchedulerContext) -> None:
        super().__init__(context)
        self._config, self._cache, self._extra = context.config, context.cache, context.extra
        self._push_key = PushTicketKey(context.config.secret)
        self._streams = PrefillStreams(context.cache.block_size, context.cache.groups)
        self._published: dict[str, RequestId] = {}
        """Finished prefill legs whose blocks are held, by match id."""
        self._match_ids: dict[RequestId, str] = {}
        """The match ids of the legs in `_published`."""
        self._declined_match_ids: OrderedDict[str, None] = OrderedDict()
        """Match ids whose two legs both run on this engine, because a router chose this engine for
        both.
        """

    # -- consumer --

    def plan_load(self, request: Request, role: LoadFromPeer) -> LoadPlan | None:
        if role.push_ticket is None:
            if role.ticket is None and role.unsigned_peer is not None and self._extra.peers:
                return self._plan_load_from(request, role.unsigned_peer)
            return None
        ticket = self._push_key.open(role.push_ticket)
        if ticket.engine == self._context.engine_id:
            self._decline(ticket.match_id)
            return LoadPlan()
        command = RegisterForPush(
            RequestId(request.request_id),
            ticket.incarnation,
            ticket.address,
            ticket.tp_size,
            self._push_info(request, ticket.match_id, str(role.push_ticket)),
        )
        return self._expect(request, command, (ticket.engine, ticket.epoch, ticket.match_id))

    def _plan_load_from(self, request: Request, peer: UnsignedPeer) -> LoadPlan:
        """Register with a prefill side that a router named without a signature. The name is trusted
        only if the address is listed in `peers`.
        """
        if peer.engine == self._context.engine_id or peer.address == self._context.address:
            # Both legs run on this engine: the blocks are in its own prefix cache, and an engine
            # never connects to itself.
            return LoadPlan()
        if str(peer.address) not in self._extra.peer_addresses:
            raise InvalidTicket(
                f"the request has no ticket, and {peer.address} is not among this engine's `peers`;"
                " add the address to `peers`, or use a router that signs push tickets"
            )
        if len(request.request_id) > MAX_TICKET_NAME_CHARS:
            raise InvalidTicket(
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
        assert self._context.address is not None
        return PushInfo(match_id, self._fingerprint(request), self._context.address, push_ticket)

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
        # computes itself: see `PeerLoads._usable`.
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

    def _decline(self, match_id: str) -> None:
        """Drop a match whose two legs both run on this engine: the blocks are in its own prefix
        cache, and an engine never connects to itself.
        """
        held = self._published.get(match_id)
        if held is not None:
            self._context.send(AbandonLease(held))
            return
        # The prefill leg has not finished yet; `finish_prefill_leg` abandons the lease.
        self._declined_match_ids[match_id] = None
        if len(self._declined_match_ids) > MAX_DECLINED:
            self._declined_match_ids.popitem(last=False)

    # -- producer --

    def announce_prefill_leg(self, request: Request, role: PrefillForPeer) -> None:
        self._context.send(ExpectPrefill(RequestId(request.request_id), self._match_id(role)))

    def add_prefill_leg(self, request: Request, role: PrefillForPeer) -> None:
        if (
            self._extra.push_streaming
            and self._context.is_producer
            and self._context.address is not None
            and len(request.request_id) <= MAX_TICKET_NAME_CHARS
        ):
            self._streams.add(request, self._match_id(role))
        self.announce_prefill_leg(request, role)

    def needs_slices(self, request: RequestId) -> bool:
        return self._streams.get(request) is not None

    def plan_step(self, slices: Iterable[ScheduledSlice]) -> None:
        """Withdraw the streams whose blocks the engine has taken away, and publish the blocks that
        earlier steps have filled.
        """
        context, slices = self._context, tuple(slices)
        # Withdraw before publishing: a resumed request may already have new blocks in this step.
        for request, serial in self._streams.withdraw_lost(slices):
            context.send(WithdrawStream(request, serial))
        for stream, new_blocks in self._streams.advance(slices):
            request = RequestId(stream.request.request_id)
            if not stream.serial:
                stream.serial = context.next_serial()
                context.send(OpenStream(request, stream.serial))
            ticket = context.ticket(stream.request, stream.serial, stream.blocks, stream.tokens)
            text, copied = context.key.sign(ticket), context.blocks_to_copy(new_blocks)
            context.send(
                PublishTicket(request, stream.match_id, text, stream.num_published, copied)
            )

    def grant_lease(self, request: RequestId, blocks: BlockIds) -> int:
        stream = self._streams.get(request)
        if stream is None or not stream.serial:
            return super().grant_lease(request, blocks)
        # Preempted and resumed since the last publication: the published blocks may hold
        # other KV by now.
        if stream.has_lost_blocks(blocks):
            self._context.send(WithdrawStream(request, stream.serial))
            return super().grant_lease(request, blocks)
        copied = self._context.blocks_to_copy(stream.unpublished(blocks))
        self._context.send(CloseStream(request, copied))
        return stream.serial

    def ticket_params(self, ticket: Ticket) -> dict[str, Any]:
        """A pull ticket, because no D may have registered. `remote_epoch` tells kvferry's router
        that this engine pushes.

        vllm-router reads `transfer_mode`: if it is push, the router sends D parameters of its own,
        which lack the ticket and are of use only if the engines list each other in `peers`.
        """
        params = {**super().ticket_params(ticket), "remote_epoch": ticket.epoch}
        return params | {"transfer_mode": "push"} if self._extra.peers else params

    def finish_prefill_leg(
        self, request: Request, role: PrefillForPeer, params: Mapping[str, Any] | None
    ) -> None:
        request_id, match_id = RequestId(request.request_id), self._match_id(role)
        self._streams.end(request_id)
        if params is None:
            reason = (
                "the prefill side holds no blocks for this request: the prefill leg ended as "
                f"{request.status.name.lower()}"
                if request.cache_salt is not None
                else "the prefill side does not exchange the KV of this request; its log says why"
            )
            self._context.send(FailPush(request_id, match_id, reason))
            return
        if match_id in self._declined_match_ids:
            del self._declined_match_ids[match_id]
            self._context.send(AbandonLease(request_id))
            return
        if match_id:
            self._published[match_id], self._match_ids[request_id] = request_id, match_id
        num_tokens = params["remote_num_tokens"]
        self._context.send(PublishTicket(request_id, match_id, params["ticket"], num_tokens))

    def end_lease(self, request: RequestId) -> None:
        self._published.pop(self._match_ids.pop(request, ""), None)

    def drop_prefill_legs(self, reason: str) -> None:
        for stream in self._streams.clear():
            request_id = RequestId(stream.request.request_id)
            self._context.send(FailPush(request_id, stream.match_id, reason))

    def _match_id(self, role: PrefillForPeer) -> str:
        """The match id of a valid push ticket. Empty without a valid ticket: then the legs are
        matched by their request ids.
        """
        try:
            return self._push_key.open(role.push_ticket).match_id
        except InvalidTicket:
            return ""
