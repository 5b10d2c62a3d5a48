"""The push connector in the process that schedules: as pull's, but a request may come before there is anything to fetch for it.

As a consumer it takes a router's push ticket, or the name of a prefill side that it believes, for a promise of the whole prompt: the
ferries register for it, and compare what they are offered with the prompt before they read. As a producer it has the ferries offer every
prefill to whoever registers for it, block by block while it computes, beside returning its ticket in the end, so that a router that asks
the prefill side first is served as in pull. Runs on the engine's main thread.
"""

from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

from kvferry.config import NixlExtraConfig
from kvferry.connectors.contract import ConnectorConfig, KVCacheConfig, KVConnectorOutput, Request, ScheduledSlice
from kvferry.connectors.offers import PullOffer
from kvferry.connectors.params import NamedPeer, PrefillForPeer, PullFromPeer, read_params
from kvferry.connectors.prefill_streams import Advance, PrefillStreams
from kvferry.connectors.pull_metadata import PullMetadata
from kvferry.connectors.pull_scheduler import PullScheduler
from kvferry.connectors.shared_tickets import TicketName
from kvferry.errors import InvalidTicket
from kvferry.ferry.commands import Abandon, Close, Expect, ExpectFrom, Open, Publish, Settle, Withdraw, Withhold
from kvferry.protocol.fingerprints import Fingerprint, fingerprint
from kvferry.protocol.push_tickets import PushTicketKey
from kvferry.protocol.tickets import MAX_NAME_CHARS, Ticket
from kvferry.types import Address, RequestId

__all__ = ["PushScheduler"]

MAX_DECLINED = 10_000


class PushScheduler(PullScheduler):
    def __init__(self, config: ConnectorConfig, cache: KVCacheConfig, extra: NixlExtraConfig) -> None:
        super().__init__(config, cache, extra)
        self._push_key = PushTicketKey(config.secret)
        self._streams = PrefillStreams(cache.block_size, cache.groups)
        self._published: dict[str, RequestId] = {}
        """By handover, those whose blocks are kept."""
        self._handovers: dict[RequestId, str] = {}
        self._declined: OrderedDict[str, None] = OrderedDict()
        """Handovers from us to us: a router has chosen this engine for both legs."""

    def on_new_request(self, request: Request) -> None:
        super().on_new_request(request)
        asked = read_params(request.kv_transfer_params)
        can_stream = self._extra.push_streaming and self._config.kv_transfer.is_kv_producer and self._issuer.address is not None
        if isinstance(asked, PrefillForPeer) and can_stream and len(request.request_id) <= MAX_NAME_CHARS:
            self._streams.add(request, self._handover(asked))

    # -- consumer --------------------------------------------------------------------------------------------------

    def _take(self, request: Request, asked: PullFromPeer) -> None:
        if asked.push_ticket is None:
            if asked.ticket is None and asked.named is not None and self._extra.peers:
                self._take_named(request, asked.named)
            else:
                self._take_ticket(request, asked.ticket)
            return
        try:
            ticket = self._push_key.open(asked.push_ticket)
        except InvalidTicket as error:
            self._refuse(request, str(error))
            return
        if ticket.engine == self._config.kv_transfer.engine_id:
            self._decline(ticket.handover)
            return
        command = Expect(RequestId(request.request_id), str(asked.push_ticket), self._fingerprint(request), self._own_address)
        self._expect(request, command, (ticket.engine, ticket.epoch, ticket.handover))

    def _take_named(self, request: Request, named: NamedPeer) -> None:
        """A router that signs nothing has named the prefill side. It is believed if it names one of those that we were told of."""
        if named.engine == self._config.kv_transfer.engine_id or named.address == self._issuer.address:
            # Both legs are ours: the blocks are in our own prefix cache, and nobody dials himself.
            return
        if str(named.address) not in self._extra.peer_addresses:
            self._refuse(request, f"there is no ticket, and {named.address} is not among this engine's `peers`")
        elif len(request.request_id) > MAX_NAME_CHARS:
            self._refuse(request, f"there is no ticket, and the request's id is longer than {MAX_NAME_CHARS} characters")
        else:
            request_id, tokens = RequestId(request.request_id), self._fingerprint(request)
            command = ExpectFrom(request_id, named.engine, named.address, named.tp_size, tokens, self._own_address)
            self._expect(request, command, None)

    @property
    def _own_address(self) -> Address:
        assert self._issuer.address is not None
        return self._issuer.address

    def _fingerprint(self, request: Request) -> Fingerprint:
        return fingerprint(request.prompt_token_ids, self._cache.block_size, request.cache_salt)

    def _expect(self, request: Request, command: Expect | ExpectFrom, shared: TicketName | None) -> None:
        """`shared`: by what other requests that wait for the same prefill know it."""
        request_id = RequestId(request.request_id)
        # An engine whose attention forgets computes the last token itself and must be told so: see `PullScheduler._usable`.
        forgets = any(group.forgets for group in self._cache.groups)
        num_tokens = request.num_prompt_tokens - forgets
        self._commands.append(command)
        if self._will_be_gone(num_tokens):
            # We compute it, and the prefill side shall know.
            self._commands.append(Settle(request_id))
        else:
            self._offers[request_id] = PullOffer(num_tokens, shared)

    def _will_be_gone(self, num_tokens: int) -> bool:
        """Whether an engine like ours lets go, at the end of the prompt, of a block that the token after these looks at."""
        size = self._cache.block_size
        return not self._cache.keeps_last_view and any(
            group.first_seen(num_tokens) // size != group.first_seen(num_tokens + 1) // size
            for group in self._cache.groups
            if group.forgets
        )

    def _decline(self, handover: str) -> None:
        """Both legs are ours: the blocks are in our own prefix cache, and nobody dials himself."""
        held = self._published.get(handover)
        if held is not None:
            self._commands.append(Abandon(held))
            return
        self._declined[handover] = None
        if len(self._declined) > MAX_DECLINED:
            self._declined.popitem(last=False)

    # -- producer --------------------------------------------------------------------------------------------------

    def build_connector_meta(self, slices: Iterable[ScheduledSlice] = ()) -> PullMetadata:
        slices = tuple(slices)
        for stream in self._streams.take_preempted(slices):
            self._commands.append(Withdraw(RequestId(stream.request.request_id), stream.serial))
            stream.serial = stream.num_published = 0
        for advance in self._streams.advances(slices):
            self._publish(advance)
        return super().build_connector_meta()

    def _publish(self, advance: Advance) -> None:
        stream, request_id = advance.stream, RequestId(advance.stream.request.request_id)
        serial = stream.serial or self._open(request_id)
        ticket = self._issuer.ticket(stream.request, serial, advance.blocks, stream.tokens)
        copied = advance.new_blocks(self._cache.block_size) if self._is_staged else ()
        self._commands.append(Publish(request_id, stream.handover, self._key.sign(ticket), advance.num_tokens, copied))
        self._streams.note_published(advance, serial)

    def _open(self, request: RequestId) -> int:
        serial = self._issuer.next_serial()
        self._commands.append(Open(request, serial))
        return serial

    def _grant(self, request: RequestId, blocks: tuple[list[int], ...]) -> int:
        stream = self._streams.get(request)
        if stream is None or not stream.serial:
            return super()._grant(request, blocks)
        if self._streams.has_let_go(stream, blocks):
            self._commands.append(Withdraw(request, stream.serial))
            return super()._grant(request, blocks)
        self._commands.append(Close(request, self._streams.unpublished(stream, blocks) if self._is_staged else ()))
        return stream.serial

    def request_finished(self, request: Request, block_ids: tuple[list[int], ...]) -> tuple[bool, dict[str, Any] | None]:
        is_kept, params = super().request_finished(request, block_ids)
        asked = read_params(request.kv_transfer_params)
        if not isinstance(asked, PrefillForPeer):
            return is_kept, params
        request_id, handover = RequestId(request.request_id), self._handover(asked)
        self._streams.end(request_id)
        if not is_kept or params is None:
            reason = f"the prefill side has nothing to hand over: its request ended as {request.status.name.lower()}"
            self._commands.append(Withhold(request_id, handover, reason))
        elif handover in self._declined:
            del self._declined[handover]
            self._commands.append(Abandon(request_id))
        else:
            self._commands.append(Publish(request_id, handover, params["ticket"], params["remote_num_tokens"]))
            if handover:
                self._published[handover], self._handovers[request_id] = request_id, handover
        return is_kept, params

    def take_output(self, output: KVConnectorOutput) -> None:
        super().take_output(output)
        for request in output.finished_sending:
            self._published.pop(self._handovers.pop(RequestId(request), ""), None)

    def _handover(self, asked: PrefillForPeer) -> str:
        """Empty without a genuine push ticket: then the legs are matched by their request ids."""
        try:
            return self._push_key.open(asked.push_ticket).handover
        except InvalidTicket:
            return ""

    def _params(self, ticket: Ticket) -> dict[str, Any]:
        return super()._params(ticket) | {"transfer_mode": "push", "remote_epoch": ticket.epoch}
