"""The pull connector in the process that schedules: checks tickets on arrival, issues them at the end, and writes the ferries' commands.

As a consumer it decides how many tokens a ticket is good for: the common prefix of the ticket's fingerprint and the request's own prompt,
nothing more, so parameters of another prompt can never be used for this one. Requests that share a ticket (one client's n choices) read
it once: the others wait for the first and then find its blocks in the engine's own cache. As a producer it signs a ticket for every
prefill it was asked to hand over. Of a turn that has ended it keeps the blocks for the next, which some prefill side may fetch before it
computes the rest; see `kept_turns.py`. Runs on the engine's main thread; never waits.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import msgspec

from kvferry.config import NixlExtraConfig
from kvferry.connectors.contract import (
    ConnectorConfig,
    KVCacheBlocks,
    KVCacheConfig,
    KVConnectorHandshakeMetadata,
    KVConnectorOutput,
    Request,
    RequestStatus,
)
from kvferry.connectors.held_blocks import HeldBlocks
from kvferry.connectors.issuing import TicketIssuer
from kvferry.connectors.kept_turns import KeptTurns
from kvferry.connectors.offers import PullOffer
from kvferry.connectors.params import BadParams, NoTransfer, PrefillForPeer, PullFromPeer, read_params
from kvferry.connectors.pull_metadata import PullHandshakeMetadata, PullMetadata, PullNews
from kvferry.connectors.shared_tickets import SharedTickets
from kvferry.connectors.stats import SIDE_CHANNEL_METRIC, TransferStats
from kvferry.errors import ConfigError, InvalidTicket, LocalProtocolError
from kvferry.ferry.commands import Abandon, Abort, Command, Grant, HandBack, Keep, LetGo, Reject, Settle, Start, Track, TryToTrack
from kvferry.ferry.side_channel import EndedTurn, SideChannel
from kvferry.protocol.fingerprints import MAX_CHAIN_POINTS, common_prefix, fingerprint
from kvferry.protocol.handshake import ServedEngine
from kvferry.protocol.tickets import HOLE, MAX_NAME_CHARS, Ticket, TicketKey
from kvferry.types import Address, EngineId, Epoch, FailurePolicy, RequestId

__all__ = ["PullScheduler"]

_log = logging.getLogger(__name__)


class PullScheduler:
    def __init__(self, config: ConnectorConfig, cache: KVCacheConfig, extra: NixlExtraConfig) -> None:
        self._config = config
        self._cache = cache
        self._extra = extra
        self._key = TicketKey(config.secret)
        self._issuer = TicketIssuer(config, cache, self._key, extra.kv_lease_duration)
        self._offers: dict[RequestId, PullOffer] = {}
        self._asked: dict[RequestId, int] = {}
        """How many tokens of it the engine had when it was last made an offer."""
        self._tickets = SharedTickets()
        self._optional: set[RequestId] = set()
        """Requests that load what they can do without."""
        self._held = HeldBlocks()
        self._kept = KeptTurns()
        self._commands: list[Command] = []
        self._side_channel: SideChannel | None = None
        self._is_staged = False
        self._stats = TransferStats()
        self._wake_engine: Callable[[], None] = _nobody

    # -- start and end ---------------------------------------------------------------------------------------------

    def set_wakeup(self, wake: Callable[[], None]) -> None:
        self._wake_engine = wake

    def serve(self, metadata: Mapping[int, KVConnectorHandshakeMetadata]) -> None:
        """All workers have registered: open the side channel."""
        parts = {rank: part for rank, part in metadata.items() if isinstance(part, PullHandshakeMetadata)}
        for rank, part in metadata.items():
            if rank not in parts:
                raise LocalProtocolError(f"rank {rank} brought handshake data of another connector: {type(part).__name__}")
        strangers = [rank for rank, part in parts.items() if part.epoch != self._config.epoch]
        if strangers:
            raise ConfigError(
                f"ranks {strangers} were started apart from their scheduler and would refuse every ticket; "
                "let vLLM start them (for Ray, with VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY=KVFERRY_)"
            )
        self._is_staged = any(part.is_staged for part in parts.values())
        served = ServedEngine(
            EngineId(self._config.kv_transfer.engine_id),
            Epoch(self._config.epoch),
            dict(next(iter(parts.values())).factors),
            {rank: part.layout for rank, part in parts.items()},
        )
        control = self._config.kit.side_channel()
        host, _, port = control.address.removeprefix("tcp://").rpartition(":")
        self._issuer.address = Address(host.strip("[]"), int(port))
        self._side_channel = SideChannel(control, served, self._key, lambda: self._wake_engine())
        self._side_channel.start()
        self._stats.data[SIDE_CHANNEL_METRIC] = str(self._issuer.address)
        _log.info("side channel open address=%s engine=%s epoch=%s", control.address, served.engine, served.epoch)

    def close(self) -> None:
        if self._side_channel is not None:
            self._side_channel.close()

    # -- consumer --------------------------------------------------------------------------------------------------

    def on_new_request(self, request: Request) -> None:
        match read_params(request.kv_transfer_params):
            case PullFromPeer() if not self._config.kv_transfer.is_kv_consumer:
                # Engines guard blocks that bytes may arrive in only if they were told that bytes may arrive.
                self._refuse(request, "this engine takes no KV from others; start it with kv_role kv_both or kv_consumer")
            case PullFromPeer() as asked:
                self._take(request, asked)
            case PrefillForPeer(ticket=text) if not self._config.kv_transfer.is_kv_producer:
                self._give_back_kept(RequestId(request.request_id), text)
                # Computed in silence, its KV would be computed a second time by whoever was to fetch it, request after request.
                self._refuse(request, "this engine hands no KV to others; start it with kv_role kv_both or kv_producer")
            case PrefillForPeer(ticket=text) if text is not None:
                self._take_kept(request, text)
            case BadParams(reason):
                self._refuse(request, reason)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        offer = self._offers.get(RequestId(request.request_id))
        if offer is None or self._tickets.was_read(offer.ticket):
            return 0, False
        # A refused request claims its whole prompt, so that the engine parks it and learns of the failure in the one way it knows.
        end = request.num_prompt_tokens if offer.refusal is not None else offer.num_tokens
        missing = end - num_computed_tokens
        self._asked[RequestId(request.request_id)] = num_computed_tokens
        if missing < offer.least:
            return 0, False
        if offer.unasked:
            offer = self._ask_keeper(RequestId(request.request_id), offer)
        return (None, False) if offer.num_unsure or self._tickets.is_being_read(offer.ticket) else (missing, True)

    def _ask_keeper(self, request: RequestId, offer: PullOffer) -> PullOffer:
        """Not before it is the request's turn: until then its keeper may need the blocks itself."""
        self._commands.append(TryToTrack(request, offer.unasked))
        self._offers[request] = offer = replace(offer, unasked="", num_unsure=self._config.parallel.tp_size)
        return offer

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        request_id = RequestId(request.request_id)
        offer = self._offers.pop(request_id, None)
        if offer is None:
            return
        first = self._asked.pop(request_id, offer.num_tokens - num_external_tokens)
        if num_external_tokens == 0:
            if offer.unasked:
                self._commands.append(Track(request_id, offer.unasked))
            if offer.refusal is None:
                self._commands.append(Settle(request_id))
            if offer.is_optional:
                self._stats.count("reuse_skipped_few_tokens")
            return
        self._tickets.begin(request_id, offer.ticket)
        if offer.is_optional:
            self._optional.add(request_id)
        if offer.refusal is not None:
            self._commands.append(Reject(request_id, offer.refusal))
            return
        table = tuple(tuple(group) for group in blocks.get_block_ids())
        # Engines may take less than was offered, never other tokens.
        end = min(first + num_external_tokens, offer.num_tokens)
        needed_from = tuple(group.first_seen(end) for group in self._cache.groups)
        self._commands.append(Start(request_id, table, first, end, needed_from))

    def take_output(self, output: KVConnectorOutput) -> None:
        """What has ended on every rank."""
        if isinstance(output.kv_connector_worker_meta, PullNews):
            self._take_news(output.kv_connector_worker_meta)
        for request in output.finished_recving:
            if self._tickets.is_loading(RequestId(request)):
                is_good = request not in output.failed_recving
                self._stats.count("finished_pulls" if is_good else "failed_pulls")
                if request in self._optional:
                    self._stats.count("reuse_pulls" if is_good else "reuse_failed_pulls")
                self._tickets.end(RequestId(request), is_good)
        for request in output.finished_sending:
            self._take_back(RequestId(request))
        if output.finished_sending:
            self._note_held()

    def _take_news(self, news: PullNews) -> None:
        for request in map(RequestId, news.promised):
            offer = self._offers.get(request)
            if offer is not None:
                self._offers[request] = replace(offer, num_unsure=offer.num_unsure - news.promised[request])
        for request, reason in ((RequestId(name), reason) for name, reason in news.refused.items()):
            if self._offers.pop(request, None) is not None:
                self._skip(request, "refused", reason)
                self._commands.append(Settle(request))
        for request in map(RequestId, news.lingering):
            self._kept.note_lingering(request)

    def is_load_optional(self, request_id: str) -> bool:
        return request_id in self._optional

    # -- producer --------------------------------------------------------------------------------------------------

    def request_finished(self, request: Request, block_ids: tuple[list[int], ...]) -> tuple[bool, dict[str, Any] | None]:
        request_id = RequestId(request.request_id)
        self._asked.pop(request_id, None)
        self._optional.discard(request_id)
        if self._offers.pop(request_id, None) is not None or self._tickets.is_loading(request_id):
            self._commands.append(Abort(request_id))
        is_whole = request.status in (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)
        asked = read_params(request.kv_transfer_params)
        is_turn = isinstance(asked, PullFromPeer | NoTransfer) and asked.turn.is_kept and self._keeps_turns and request.family is None
        if not is_whole or not (is_turn or isinstance(asked, PrefillForPeer)):
            return False, None
        num_tokens = request.num_computed_tokens
        if len(request_id) > MAX_NAME_CHARS:
            _log.warning("not handed over: its id is longer than %d characters request=%.80s…", MAX_NAME_CHARS, request_id)
            return False, None
        if num_tokens == 0 or self._issuer.address is None or not self._config.kv_transfer.is_kv_producer:
            return False, None
        num_blocks = -(-num_tokens // self._cache.block_size)
        held = tuple(group[:num_blocks] for group in block_ids)
        num_held = sum(block != HOLE for group in held for block in group)
        if isinstance(asked, PullFromPeer | NoTransfer):
            params = self._keep(request, held, num_tokens, asked.turn.word)
            self._kept.keep(request_id, num_held, asked.turn.word)
        else:
            params = self._params(self._issue(request, held, num_tokens))
            self._held.hold(request_id, num_held, request.family)
        self._note_held()
        return True, params

    @property
    def _keeps_turns(self) -> bool:
        return self._extra.bidirectional_kv_xfer and self._config.kv_transfer.is_kv_producer

    def _keep(self, request: Request, blocks: tuple[list[int], ...], num_tokens: int, word: str) -> dict[str, Any]:
        """Let ferries keep an ended turn's blocks; the parameters for whoever computes the next one."""
        ttl_s = self._extra.decoder_kv_blocks_ttl
        tokens = fingerprint(request.all_token_ids[:num_tokens], self._cache.block_size, request.cache_salt, MAX_CHAIN_POINTS)
        serial = self._issuer.next_serial()
        self._commands.append(Keep(RequestId(request.request_id), serial, ttl_s, self._copied(blocks)))
        ticket = self._issuer.ticket(request, serial, blocks, tokens)
        ticket = msgspec.structs.replace(ticket, ttl_s=ttl_s, renewal_s=self._extra.kv_lease_duration)
        params = self._params(ticket) | {"do_remote_prefill": False, "do_remote_decode": True, "ttl_s": ttl_s}
        self._stats.count("kept_turns")
        if word and self._side_channel is not None:
            self._side_channel.tell(EndedTurn(word, msgspec.json.encode(params).decode(), ttl_s))
        return params

    def want_blocks(self, num_blocks: int) -> None:
        """The engine lacks so many: the oldest of the kept turns are let go."""
        for request in self._kept.let_go(num_blocks):
            self._stats.count("kept_turns_evicted")
            self._commands.append(LetGo(request))

    def has_pending_block_frees(self) -> bool:
        return self._kept.has_leaving

    def _take_back(self, request: RequestId) -> None:
        """Its lease has ended on every rank."""
        word = self._kept.end(request)
        if word and self._side_channel is not None:
            self._side_channel.tell(EndedTurn(word))
        if word is None:
            self._commands += [Abandon(other) for other in self._held.free(request)]

    def _note_held(self) -> None:
        self._stats.set_level("num_held_blocks", "scheduler", self._held.num_blocks)
        self._stats.set_level("num_kept_turns", "scheduler", len(self._kept))
        self._stats.set_level("num_kept_blocks", "scheduler", self._kept.num_blocks)

    def request_abandoned(self, request_id: str) -> None:
        self._commands.append(Abandon(RequestId(request_id)))

    def _issue(self, request: Request, blocks: tuple[list[int], ...], num_tokens: int) -> Ticket:
        tokens = fingerprint(request.all_token_ids[:num_tokens], self._cache.block_size, request.cache_salt)
        return self._issuer.ticket(request, self._grant(RequestId(request.request_id), blocks), blocks, tokens)

    def _grant(self, request: RequestId, blocks: tuple[list[int], ...]) -> int:
        """Let ferries lease the blocks; the serial of that lease."""
        serial = self._issuer.next_serial()
        self._commands.append(Grant(request, serial, self._copied(blocks)))
        return serial

    def _copied(self, blocks: tuple[list[int], ...]) -> tuple[tuple[int, ...], ...]:
        return tuple(map(tuple, blocks)) if self._is_staged else ()

    def _params(self, ticket: Ticket) -> dict[str, Any]:
        return self._issuer.params(ticket)

    # -- every step ------------------------------------------------------------------------------------------------

    def has_pending_commands(self) -> bool:
        return bool(self._commands) or (self._side_channel is not None and self._side_channel.has_released)

    def build_connector_meta(self) -> PullMetadata:
        if self._side_channel is not None:
            self._commands += self._side_channel.take_released()
        commands, self._commands = tuple(self._commands), []
        return PullMetadata(commands)

    def take_stats(self) -> TransferStats | None:
        if self._side_channel is not None and (dropped := self._side_channel.take_num_dropped()):
            self._stats.count("dropped_messages", dropped)
        stats, self._stats = self._stats, TransferStats()
        return None if stats.is_empty() else stats

    # -- inside ----------------------------------------------------------------------------------------------------

    def _take(self, request: Request, asked: PullFromPeer) -> None:
        if asked.ticket is None and asked.push_ticket is not None:
            self._refuse(
                request, "this engine pulls and was given a push ticket; ask the prefill side first, or use NixlPushConnector here"
            )
        else:
            self._take_ticket(request, asked.ticket)

    def _take_ticket(self, request: Request, text: object) -> None:
        request_id = RequestId(request.request_id)
        try:
            ticket = self._key.open(text)
        except InvalidTicket as error:
            self._refuse(request, str(error))
            return
        if ticket.engine == self._config.kv_transfer.engine_id:
            self._take_own_ticket(ticket)
            return
        matched = self._usable(
            ticket, common_prefix(ticket.tokens, request.prompt_token_ids, request.cache_salt), request.num_prompt_tokens
        )
        self._offers[request_id] = PullOffer(matched, (ticket.engine, ticket.epoch, ticket.serial))
        self._commands.append(Track(request_id, str(text)))

    def _take_kept(self, request: Request, text: object) -> None:
        """A decode side may have kept what the conversation had come to. Whatever is wrong with that, the request is computed."""
        request_id = RequestId(request.request_id)
        try:
            ticket = self._key.open(text)
        except InvalidTicket as error:
            self._skip(request_id, "invalid", str(error))
            return
        if ticket.engine == self._config.kv_transfer.engine_id:
            self._skip(request_id, "own", "it was this engine that kept it")
            self._take_own_ticket(ticket)
            return
        matched = common_prefix(ticket.tokens, request.prompt_token_ids, request.cache_salt)
        matched = self._usable(ticket, matched, request.num_prompt_tokens)
        least = max(1, self._extra.kv_recompute_threshold)
        if not (self._extra.bidirectional_kv_xfer and self._config.kv_transfer.is_kv_consumer):
            self._skip(request_id, "off", "this engine does not fetch what decode sides have kept")
        elif matched < least:
            self._skip(request_id, "few_tokens" if matched else "other_tokens", f"it has {matched} tokens in common with the prompt")
        else:
            name = (ticket.engine, ticket.epoch, ticket.serial)
            self._offers[request_id] = PullOffer(matched, name, least=least, is_optional=True, unasked=str(text))
            return
        # Its keeper shall have its blocks back.
        self._commands += [Track(request_id, str(text)), Settle(request_id)]

    def _give_back_kept(self, request: RequestId, text: object) -> None:
        """A router has presented the conversation's only ticket to one that may not use it."""
        try:
            ticket = self._key.open(text)
        except InvalidTicket:
            return
        if ticket.engine != self._config.kv_transfer.engine_id:
            self._commands += [Track(request, str(text)), Settle(request)]

    def _skip(self, request: RequestId, why: str, reason: str) -> None:
        self._stats.count(f"reuse_skipped_{why}")
        _log.info("what was kept of the conversation is not fetched request=%s reason=%s", request, reason)

    def _usable(self, ticket: Ticket, matched: int, num_prompt_tokens: int) -> int:
        """How many of the matched tokens can be loaded: all, or none where the producer has let go of what the next token looks at.

        An engine computes a prompt's last token itself. One whose attention forgets must be told so: it decides by the number of loaded
        tokens which blocks it needs, and the last token looks further back than the one after it.
        """
        if not any(group.forgets for group in self._cache.groups):
            return matched
        matched = min(matched, num_prompt_tokens - 1)
        needed = -(-matched // ticket.block_size)
        for group, blocks in zip(self._cache.groups, ticket.block_ids(), strict=False):
            if HOLE in blocks[group.first_seen(matched) // ticket.block_size : needed]:
                return 0
        return matched

    def _take_own_ticket(self, ticket: Ticket) -> None:
        """A router that chose us for both legs: the blocks are in our own prefix cache, and nobody dials himself."""
        if ticket.epoch == self._config.epoch:
            self._commands.append(HandBack(ticket.lease, ticket.serial))

    def _refuse(self, request: Request, reason: str) -> None:
        self._stats.count("rejected_params")
        _log.warning("transfer parameters refused request=%s reason=%s", request.request_id, reason)
        if self._config.kv_transfer.kv_load_failure_policy is FailurePolicy.FAIL:
            self._offers[RequestId(request.request_id)] = PullOffer(0, refusal=reason)


def _nobody() -> None:
    return None
