"""The scheduler side of the pull and push connectors: checks tickets when requests arrive, issues
tickets when requests finish, and writes the commands for the transfer workers.

Where pull and push differ, the scheduler asks its `TransferMode` (`transfer_mode.py`,
`push_mode.py`) and carries out what the mode decides.

As a consumer, the scheduler decides how many tokens of a ticket are usable: the common prefix of
the ticket's fingerprint and the request's own prompt. So a ticket for another prompt can never be
used for this one. Requests that share a ticket (the n choices of one client request) read the KV
once: the later requests wait for the first request and then find its blocks in the engine's own
prefix cache.

As a producer, the scheduler signs a ticket for every prefill leg. If the decode side retains
finished turns, it keeps the blocks of a finished turn for the next turn; a prefill side may fetch
the blocks before it computes the rest (`RetainedTurns` in `scheduler_tables.py`,
docs/decisions/033-reuse.md).

Runs on the engine's main thread and never blocks.
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
    SchedulerSide,
    Step,
)
from kvferry.connectors.nixl.metadata import (
    NixlConnectorMetadata,
    NixlHandshakeMetadata,
    NixlWorkerMetadata,
    registered_epoch,
)
from kvferry.connectors.nixl.params import (
    BadParams,
    LoadFromPeer,
    NoTransfer,
    PrefillForPeer,
    TransferRole,
    read_leg_id,
    read_params,
)
from kvferry.connectors.nixl.tables import (
    HeldBlocks,
    LoadOffer,
    LoadTable,
    RetainedTurns,
    SharedTicketKey,
)
from kvferry.connectors.nixl.transfer_mode import (
    LoadByTicket,
    LoadPlan,
    LoadRefusal,
    TicketIssuer,
    TransferMode,
)
from kvferry.connectors.stats import SIDE_CHANNEL_METRIC, TransferStats
from kvferry.errors import ConfigError, InvalidTicket, LocalProtocolError
from kvferry.protocol.fingerprints import MAX_CHAIN_POINTS, Fingerprint, common_prefix, fingerprint
from kvferry.protocol.handshake import ServedEngine
from kvferry.protocol.tickets import HOLE, MAX_TICKET_NAME_CHARS, PushTicketKey, Ticket
from kvferry.types import Address, EngineId, FailurePolicy, RequestId
from kvferry.worker.commands import (
    AbandonLease,
    AbortLoad,
    EvictTurn,
    PrepareLoad,
    PrepareOptionalLoad,
    RejectLoad,
    ReleaseTicket,
    RetainTurn,
    RevokeLease,
    SkipLoad,
    StartLoad,
    WorkerCommand,
)
from kvferry.worker.side_channel import EndedTurn, SideChannel

_WEIGHTS_CHANGED = (
    "this engine's weights may have changed since the request arrived; send the request again"
)

_TOO_LATE = (
    "ticket not used request=%s reason=another request of the same prompt reads its states or has "
    "read them; this engine computes the prompt"
)

_log = logging.getLogger(__name__)


class NixlConnectorScheduler(SchedulerSide):
    """The state and decisions of a connector in the process that schedules."""

    def __init__(
        self,
        config: ConnectorConfig,
        cache: KVCacheConfig,
        extra: NixlExtraConfig,
        issuer: TicketIssuer,
        mode: TransferMode,
    ) -> None:
        self._config = config
        self._cache = cache
        self._extra = extra
        self._issuer = issuer
        self._mode = mode
        self._loads = LoadTable()
        self._held = HeldBlocks()
        self._retained = RetainedTurns()
        self._live: set[RequestId] = set()
        self._outdated: set[RequestId] = set()
        """Live requests that arrived before the last reset: their KV may be of older weights."""
        self._commands: list[WorkerCommand] = []
        self._optional_loads: list[RequestId] = []
        """The optional loads that start in the next step."""
        self._side_channel: SideChannel | None = None
        self._stats = TransferStats()
        self._wake_engine: Callable[[], None] = _no_wakeup

    # -- start and end --

    def set_wakeup(self, wake: Callable[[], None]) -> None:
        self._wake_engine = wake

    def set_xfer_handshake_metadata(
        self, metadata: Mapping[int, KVConnectorHandshakeMetadata]
    ) -> None:
        """Open the side channel. Called when all workers have registered their caches, and again
        when they have registered them after a sleep.
        """
        parts = {
            rank: part for rank, part in metadata.items() if isinstance(part, NixlHandshakeMetadata)
        }
        for rank, part in metadata.items():
            if rank not in parts:
                raise LocalProtocolError(
                    f"rank {rank} sent {type(part).__name__} instead of NixlHandshakeMetadata; "
                    "the scheduler and all ranks must use the same connector"
                )
        foreign_ranks = [rank for rank, part in parts.items() if part.epoch != self._config.epoch]
        if foreign_ranks:
            raise ConfigError(
                f"ranks {foreign_ranks} have another epoch than their scheduler and would refuse "
                "every ticket of this engine; let vLLM start the ranks, so that they get the "
                "scheduler's epoch (with Ray, set "
                "VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY=KVFERRY_)"
            )
        registrations = {part.registration for part in parts.values()}
        if len(registrations) > 1:
            raise LocalProtocolError(
                f"the ranks have registered their caches {sorted(registrations)} times after a "
                "sleep; restart the engine"
            )
        self._issuer.epoch = registered_epoch(self._config.epoch, registrations.pop())
        self._issuer.uses_host_buffer = any(part.uses_host_buffer for part in parts.values())
        served = ServedEngine(
            EngineId(self._config.kv_transfer.engine_id),
            self._issuer.epoch,
            dict(next(iter(parts.values())).factors),
            {rank: part.layout for rank, part in parts.items()},
        )
        if self._side_channel is not None:
            self._side_channel.serve(served)
            _log.info("side channel serves another epoch epoch=%s", served.epoch)
            return
        control = self._config.kit.side_channel()
        address = Address.parse(control.address.removeprefix("tcp://"))
        assert address is not None
        self._issuer.address = address
        keys = (self._issuer.key, PushTicketKey(self._config.secret))
        self._side_channel = SideChannel(control, served, keys, lambda: self._wake_engine())
        self._side_channel.start()
        self._stats.data[SIDE_CHANNEL_METRIC] = str(self._issuer.address)
        _log.info(
            "side channel open address=%s engine=%s epoch=%s",
            control.address,
            served.engine,
            served.epoch,
        )

    def shutdown(self) -> None:
        if self._side_channel is not None:
            self._side_channel.close()

    # -- consumer --

    def expect_request(self, request: Request) -> None:
        """Note a request whose ticket cannot be read yet, because the version of this engine's
        weights is unknown: its peer must neither give up the request nor free its blocks meanwhile.
        """
        role = read_params(request.kv_transfer_params)
        match role:
            case PrefillForPeer():
                self._commands += self._mode.announce_prefill_leg(request, role)
            case LoadFromPeer(ticket=text, push_ticket=None) if (
                self._config.kv_transfer.is_kv_consumer and self._is_ticket_of_peer(text)
            ):
                # `on_new_request` repeats the command, which then changes nothing.
                self._commands.append(PrepareLoad(RequestId(request.request_id), str(text)))

    def on_new_request(self, request: Request) -> None:
        self._live.add(RequestId(request.request_id))
        role = read_params(request.kv_transfer_params)
        match role:
            case LoadFromPeer() if not self._config.kv_transfer.is_kv_consumer:
                # An engine protects blocks against early reuse while bytes may arrive only if its
                # role is consumer.
                self._refuse(
                    request,
                    "the kv_role of this engine does not allow it to load KV from a peer; start "
                    "the engine with kv_role kv_both or kv_consumer",
                )
            case LoadFromPeer():
                self._plan_load(request, role)
            case PrefillForPeer(ticket=text) if not self._config.kv_transfer.is_kv_producer:
                self._return_retained_turn(RequestId(request.request_id), text)
                # Computing the prefill and issuing no ticket would hide the mistake: the decode
                # side would compute every such prompt a second time.
                self._refuse(
                    request,
                    "the kv_role of this engine does not allow it to prefill for a peer; start "
                    "the engine with kv_role kv_both or kv_producer",
                )
            case PrefillForPeer(ticket=text) if text is not None:
                self._take_retained_turn(request, text)
            case BadParams(reason):
                self._refuse(request, reason)
        if isinstance(role, PrefillForPeer):
            self._commands += self._mode.add_prefill_leg(request, role)
        request_id, leg_id = RequestId(request.request_id), read_leg_id(request.kv_transfer_params)
        if leg_id and (offer := self._loads.get(request_id)) is not None:
            self._loads.offer(request_id, replace(offer, leg_id=leg_id))

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        request_id = RequestId(request.request_id)
        offer = self._loads.get(request_id)
        if offer is None or (self._reads_once and self._loads.was_read(offer.ticket)):
            return 0, False
        # A refused request claims its whole prompt, so that the engine waits for the load and then
        # handles the failure on the ordinary path of a failed load.
        end = request.num_prompt_tokens if offer.refusal is not None else offer.num_tokens
        missing = end - num_computed_tokens
        offer = replace(offer, num_local_tokens=num_computed_tokens)
        if missing < offer.min_tokens:
            self._loads.offer(request_id, offer)
            return 0, False
        if offer.unchecked_ticket:
            # Ask the retaining engine for a reservation only now that the engine tries to schedule
            # the request: until then the retaining engine may need the blocks itself.
            self._commands.append(PrepareOptionalLoad(request_id, offer.unchecked_ticket))
            offer = replace(
                offer, unchecked_ticket="", num_pending_ranks=self._config.parallel.tp_size
            )
        self._loads.offer(request_id, offer)
        if offer.num_pending_ranks or (
            self._reads_once and self._loads.is_being_read(offer.ticket)
        ):
            return None, False
        return missing, True

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        request_id = RequestId(request.request_id)
        offer = self._loads.withdraw(request_id)
        if offer is None:
            return
        if num_external_tokens == 0:
            # The producer waits for a reader of each ticket: `PrepareLoad` then `SkipLoad` ends the
            # lease early.
            if offer.unchecked_ticket:
                self._commands.append(PrepareLoad(request_id, offer.unchecked_ticket))
            if offer.refusal is None:
                self._commands.append(SkipLoad(request_id))
            if offer.is_optional:
                self._stats.count("reuse_skipped_few_tokens")
            return
        self._loads.begin(request_id, offer)
        if offer.is_optional:
            self._optional_loads.append(request_id)
        if offer.refusal is not None:
            self._commands.append(RejectLoad(request_id, offer.refusal))
            return
        first = offer.num_local_tokens
        if first is None:
            first = offer.num_tokens - num_external_tokens
        # An engine may take fewer tokens than offered, but never other tokens.
        end = min(first + num_external_tokens, offer.num_tokens)
        table = tuple(map(tuple, self._cache.block_lists(blocks.get_block_ids(), end)))
        if self._cache.has_states and end != offer.num_tokens:
            reason = (
                f"this engine asked for the KV of {end} tokens, but the states that the prefill "
                f"side holds are those after {offer.num_tokens} tokens"
            )
            self._commands.append(RejectLoad(request_id, reason))
            return
        if any(
            group.is_state and blocks_of[-1] == HOLE
            for group, blocks_of in zip(self._cache.groups, table, strict=True)
        ):
            reason = f"this engine has no block for the states after {end} tokens"
            self._commands.append(RejectLoad(request_id, reason))
            return
        needed_from = tuple(group.first_visible_token(end) for group in self._cache.groups)
        self._commands.append(StartLoad(request_id, table, first, end, needed_from))

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Process the requests that ended on every rank."""
        if isinstance(metadata := connector_output.kv_connector_worker_meta, NixlWorkerMetadata):
            self._take_worker_metadata(metadata)
        for request in connector_output.finished_recving:
            if self._loads.is_loading(RequestId(request)):
                is_good = request not in connector_output.failed_recving
                self._stats.count("finished_loads" if is_good else "failed_loads")
                if self._loads.is_optional(RequestId(request)):
                    self._stats.count("reuse_loads" if is_good else "reuse_failed_loads")
                self._loads.end(RequestId(request), is_good)
        for request in connector_output.finished_sending:
            self._end_lease(RequestId(request))
            self._mode.end_lease(RequestId(request))
        if connector_output.finished_sending:
            self._report_held_blocks()

    def _take_worker_metadata(self, worker_metadata: NixlWorkerMetadata) -> None:
        for request in map(RequestId, worker_metadata.reserved):
            offer = self._loads.get(request)
            if offer is not None:
                num_pending = offer.num_pending_ranks - worker_metadata.reserved[request]
                self._loads.offer(request, replace(offer, num_pending_ranks=num_pending))
        # One refusing rank is enough: a load needs the blocks of all ranks.
        for request, reason in (
            (RequestId(name), reason) for name, reason in worker_metadata.refused.items()
        ):
            if self._loads.withdraw(request) is not None:
                self._skip_reuse(request, "refused", reason)
                self._commands.append(SkipLoad(request))
        for request in map(RequestId, worker_metadata.being_read):
            self._retained.note_being_read(request)
        for request, reason in (
            (RequestId(name), reason) for name, reason in worker_metadata.failed.items()
        ):
            self._publish_failure(self._loads.leg_id(request), reason)

    def is_load_optional(self, request_id: str) -> bool:
        return self._loads.is_optional(RequestId(request_id))

    # -- producer --

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        request_id = RequestId(request.request_id)
        if self._loads.finish_request(request_id):
            self._commands.append(AbortLoad(request_id))
        role = read_params(request.kv_transfer_params)
        params = self._hold_blocks(request, role, block_ids)
        self._live.discard(request_id)
        self._outdated.discard(request_id)
        if isinstance(role, PrefillForPeer):
            self._commands += self._mode.finish_prefill_leg(request, role, params)
        elif params is None and isinstance(role, LoadFromPeer | NoTransfer):
            self._publish_turn(EndedTurn(role.retention.turn_id))
        return params is not None, params

    def _hold_blocks(
        self, request: Request, role: TransferRole, block_ids: tuple[list[int], ...]
    ) -> dict[str, Any] | None:
        """Hold the blocks of a finished request for a peer and return the parameters that carry the
        ticket; None if no peer may fetch the blocks.
        """
        request_id = RequestId(request.request_id)
        is_whole = request.status in (
            RequestStatus.FINISHED_STOPPED,
            RequestStatus.FINISHED_LENGTH_CAPPED,
        )
        is_turn = (
            isinstance(role, LoadFromPeer | NoTransfer)
            and role.retention.is_retained
            and self._retains_turns
            and request.family is None
        )
        if not is_whole or not (is_turn or isinstance(role, PrefillForPeer)):
            return None
        num_tokens = request.num_computed_tokens
        if len(request_id) > MAX_TICKET_NAME_CHARS:
            _log.warning(
                "no ticket issued: the request id is longer than %d characters request=%.80s…",
                MAX_TICKET_NAME_CHARS,
                request_id,
            )
            return None
        if (
            num_tokens == 0
            or self._issuer.address is None
            or request_id in self._outdated
            or not self._config.kv_transfer.is_kv_producer
        ):
            return None
        salt = request.cache_salt
        if salt is None:
            return None
        held = self._cache.block_lists(block_ids, num_tokens)
        all_tokens = request.all_token_ids[:num_tokens]
        num_held = sum(block != HOLE for group in held for block in group)
        if isinstance(role, LoadFromPeer | NoTransfer):
            tokens = fingerprint(all_tokens, self._cache.block_size, salt, MAX_CHAIN_POINTS)
            params = self._retain(request, held, tokens, role.retention.turn_id)
            self._retained.retain(request_id, num_held, role.retention.turn_id)
        else:
            tokens = fingerprint(all_tokens, self._cache.block_size, salt)
            ticket = self._issue(request, held, tokens)
            params = self._mode.ticket_params(ticket)
            self._held.hold(request_id, num_held, request.family)
            self._publish_leg(request, ticket)
        self._report_held_blocks()
        return params

    @property
    def _retains_turns(self) -> bool:
        return self._extra.bidirectional_kv_xfer and self._config.kv_transfer.is_kv_producer

    def _retain(
        self, request: Request, blocks: tuple[list[int], ...], tokens: Fingerprint, turn_id: str
    ) -> dict[str, Any]:
        """Command the transfer workers to retain a finished turn's blocks, and return the
        parameters for the next turn.
        """
        lease_ttl_s = self._extra.decoder_kv_blocks_ttl
        serial = self._issuer.next_serial()
        copied = self._issuer.blocks_to_copy(blocks)
        self._commands.append(
            RetainTurn(RequestId(request.request_id), serial, lease_ttl_s, copied)
        )
        ticket = self._issuer.ticket(request, serial, blocks, tokens)
        params = self._mode.ticket_params(ticket) | {
            "do_remote_prefill": False,
            "do_remote_decode": True,
            "ttl_s": lease_ttl_s,
        }
        self._stats.count("retained_turns")
        self._publish_turn(EndedTurn(turn_id, msgspec.json.encode(params).decode(), lease_ttl_s))
        return params

    def _publish_turn(self, turn: EndedTurn) -> None:
        """Let routers ask for an ended turn, unless no router has named it."""
        if turn.turn_id and self._side_channel is not None:
            self._side_channel.publish_turn(turn)

    def _publish_leg(self, request: Request, ticket: Ticket) -> None:
        """Let the router release the ticket of a prefill leg even if the answer that carries the
        ticket does not reach the router.
        """
        leg_id = read_leg_id(request.kv_transfer_params)
        if leg_id and self._side_channel is not None:
            self._side_channel.publish_leg(leg_id, ReleaseTicket(ticket.lease, ticket.serial))

    def reclaim_blocks(self, num_blocks: int) -> None:
        """Evict the oldest retained turns, because the engine lacks `num_blocks` blocks."""
        for request in self._retained.evict(num_blocks):
            self._stats.count("retained_turns_evicted")
            self._commands.append(EvictTurn(request))

    def has_pending_block_frees(self) -> bool:
        return self._retained.has_evicting

    def reset_cache(self) -> None:
        """Drop all KV, because the engine's weights may have changed. No request that is live now
        loads KV from a peer or offers its KV to one.
        """
        self._outdated |= self._live
        for request, offer in self._loads.withdraw_all().items():
            if offer.unchecked_ticket:
                self._commands.append(PrepareLoad(request, offer.unchecked_ticket))
            self._commands.append(SkipLoad(request))
            if not offer.is_optional:
                self._refuse_load(request, _WEIGHTS_CHANGED, offer.leg_id)
        # If a load ends before the command arrives, the engine computes the request.
        self._commands += [AbortLoad(request, _WEIGHTS_CHANGED) for request in self._loads.loading]
        for request in (*self._held.requests, *self._retained.evict_all()):
            self._commands.append(RevokeLease(request))
        self._commands += self._mode.drop_prefill_legs(
            "the prefill side's weights may have changed while it computed the prompt"
        )

    def set_weights_version(self, version: str) -> None:
        self._issuer.weights = version

    def _end_lease(self, request: RequestId) -> None:
        """Process the end of a lease, which has ended on every rank."""
        turn_id = self._retained.end(request)
        if turn_id is not None:
            self._publish_turn(EndedTurn(turn_id))
        else:
            self._commands += [AbandonLease(other) for other in self._held.free(request)]

    def _report_held_blocks(self) -> None:
        self._stats.set_level("num_held_blocks", "scheduler", self._held.num_blocks)
        self._stats.set_level("num_retained_turns", "scheduler", len(self._retained))
        self._stats.set_level("num_retained_blocks", "scheduler", self._retained.num_blocks)

    def request_abandoned(self, request_id: str) -> None:
        self._commands.append(AbandonLease(RequestId(request_id)))

    def _issue(
        self, request: Request, blocks: tuple[list[int], ...], tokens: Fingerprint
    ) -> Ticket:
        grant = self._mode.grant_lease(RequestId(request.request_id), blocks)
        self._commands += grant.commands
        return self._issuer.ticket(request, grant.serial, blocks, tokens)

    # -- every step --

    def has_pending_push_work(self) -> bool:
        return bool(self._commands) or (
            self._side_channel is not None and self._side_channel.has_released
        )

    def build_connector_meta(self, scheduler_output: Step) -> NixlConnectorMetadata:
        self._commands += self._mode.step_commands(scheduler_output.slices)
        if self._side_channel is not None:
            self._commands += self._side_channel.take_released()
        commands, self._commands = tuple(self._commands), []
        optional, self._optional_loads = frozenset(self._optional_loads), []
        return NixlConnectorMetadata(commands, optional)

    def needs_slices(self, request_id: str) -> bool:
        return self._mode.needs_slices(RequestId(request_id))

    def get_kv_connector_stats(self) -> TransferStats | None:
        if self._side_channel is not None and (dropped := self._side_channel.take_num_dropped()):
            self._stats.count("dropped_messages", dropped)
        stats, self._stats = self._stats, TransferStats()
        return None if stats.is_empty() else stats

    # -- inside --

    def _plan_load(self, request: Request, role: LoadFromPeer) -> None:
        match self._mode.plan_load(request, role):
            case LoadByTicket(text):
                self._take_ticket(request, text)
            case LoadRefusal(reason):
                self._refuse(request, reason)
            case LoadPlan(_, LoadOffer(ticket=key)) if self._comes_too_late(key):
                _log.info(_TOO_LATE, request.request_id)
            case LoadPlan(commands, offer):
                self._commands += commands
                if offer is not None:
                    self._loads.offer(RequestId(request.request_id), offer)

    def _take_ticket(self, request: Request, text: object) -> None:
        request_id = RequestId(request.request_id)
        try:
            ticket = self._issuer.key.open(text)
        except InvalidTicket as error:
            self._refuse(request, str(error))
            return
        if ticket.engine == self._config.kv_transfer.engine_id:
            self._take_own_ticket(ticket)
            return
        if ticket.weights != self._issuer.weights:
            self._commands += [PrepareLoad(request_id, str(text)), SkipLoad(request_id)]
            self._refuse(request, self._describe_other_weights(ticket))
            return
        shared = _shared_tokens(ticket, request)
        matched = self._usable(ticket, shared, request.num_prompt_tokens)
        if not matched:
            self._stats.count("unmatched_tickets")
            reason = (
                f"its states are those after {ticket.num_tokens} tokens, of which the "
                f"{request.num_prompt_tokens} tokens of the prompt begin with {shared}"
                if self._cache.has_states and shared
                else "no token of the prompt can be loaded with it"
            )
            _log.warning(
                "ticket not used request=%s peer=%s reason=%s; this engine computes the prompt",
                request_id,
                ticket.engine,
                reason,
            )
            self._publish_failure(
                read_leg_id(request.kv_transfer_params), f"the ticket was not used: {reason}"
            )
        key = (ticket.engine, ticket.epoch, ticket.serial)
        if self._comes_too_late(key):
            _log.info(_TOO_LATE, request_id)
            return
        self._loads.offer(request_id, LoadOffer(matched, key))
        self._commands.append(PrepareLoad(request_id, str(text)))

    def _take_retained_turn(self, request: Request, text: object) -> None:
        """Offer a turn that a decode side may have retained. Whatever is wrong with the ticket, the
        engine computes the request.
        """
        request_id = RequestId(request.request_id)
        try:
            ticket = self._issuer.key.open(text)
        except InvalidTicket as error:
            self._skip_reuse(request_id, "invalid", str(error))
            return
        if ticket.engine == self._config.kv_transfer.engine_id:
            self._skip_reuse(request_id, "own", "this engine itself retains the turn")
            self._take_own_ticket(ticket)
            return
        if ticket.weights != self._issuer.weights:
            self._commands += [PrepareLoad(request_id, str(text)), SkipLoad(request_id)]
            self._skip_reuse(request_id, "other_tokens", self._describe_other_weights(ticket))
            return
        matched = self._usable(ticket, _shared_tokens(ticket, request), request.num_prompt_tokens)
        min_tokens = max(1, self._extra.kv_recompute_threshold)
        if not (self._extra.bidirectional_kv_xfer and self._config.kv_transfer.is_kv_consumer):
            self._skip_reuse(
                request_id,
                "off",
                "this engine does not load retained turns; set bidirectional_kv_xfer, and kv_role "
                "kv_both",
            )
        elif matched < min_tokens:
            self._skip_reuse(
                request_id,
                "few_tokens" if matched else "other_tokens",
                f"{matched} tokens of the prompt can be loaded from it, fewer than {min_tokens}",
            )
        else:
            key = (ticket.engine, ticket.epoch, ticket.serial)
            offer = LoadOffer(
                matched, key, min_tokens=min_tokens, is_optional=True, unchecked_ticket=str(text)
            )
            self._loads.offer(request_id, offer)
            return
        # The ticket is not used: let the retaining engine free the blocks now.
        self._commands += [PrepareLoad(request_id, str(text)), SkipLoad(request_id)]

    def _return_retained_turn(self, request: RequestId, text: object) -> None:
        """Release a retained turn: a router presented the conversation's only ticket to an engine
        that may not use the ticket.
        """
        if self._is_ticket_of_peer(text):
            self._commands += [PrepareLoad(request, str(text)), SkipLoad(request)]

    def _is_ticket_of_peer(self, text: object) -> bool:
        try:
            return self._issuer.key.open(text).engine != self._config.kv_transfer.engine_id
        except InvalidTicket:
            return False

    def _skip_reuse(self, request: RequestId, why: str, reason: str) -> None:
        self._stats.count(f"reuse_skipped_{why}")
        _log.info("retained turn not loaded request=%s reason=%s", request, reason)

    def _usable(self, ticket: Ticket, matched: int, num_prompt_tokens: int) -> int:
        """How many of the matched tokens can be loaded: all of them, or none if the producer has
        freed a block that the next token attends to.

        An engine always computes the last token of a prompt itself. If some group has local
        attention, the offer must leave the last token out: the engine decides from the number of
        loaded tokens which blocks it needs, and the last token attends further back than the token
        after it. States are those after exactly the ticket's tokens, so the engine loads these
        tokens or none.
        """
        if not self._cache.leaves_last_token:
            return matched
        matched = min(matched, num_prompt_tokens - 1)
        if self._cache.has_states and matched != ticket.num_tokens:
            return 0
        needed = -(-matched // ticket.block_size)
        for group, blocks in zip(self._cache.groups, ticket.block_ids(), strict=False):
            if HOLE in blocks[group.first_visible_token(matched) // ticket.block_size : needed]:
                return 0
        return matched

    @property
    def _reads_once(self) -> bool:
        """Whether one of the requests that share a ticket reads, and the others find its blocks in
        the engine's prefix cache. That cache keeps no states at the end of a prompt.
        """
        return not self._cache.has_states

    def _comes_too_late(self, key: SharedTicketKey | None) -> bool:
        """Whether a new request must not read a ticket for itself: another request has begun to
        read it, and the producer may end the lease before it learns of the new one.
        """
        return not self._reads_once and (
            self._loads.is_being_read(key) or self._loads.was_read(key)
        )

    def _take_own_ticket(self, ticket: Ticket) -> None:
        """Release the lease of a ticket that this engine issued itself.

        A router chose this engine for both legs: the blocks are in the engine's own prefix cache,
        and an engine never connects to itself.
        """
        if ticket.epoch == self._issuer.epoch:
            self._commands.append(ReleaseTicket(ticket.lease, ticket.serial))

    def _describe_other_weights(self, ticket: Ticket) -> str:
        return (
            f"{ticket.engine} computed the KV with other weights (version "
            f"{ticket.weights or 'of its start'}) than this engine has (version "
            f"{self._issuer.weights or 'of its start'}); load the same weights into both engines "
            "and reset the caches of both"
        )

    def _refuse(self, request: Request, reason: str) -> None:
        leg_id = read_leg_id(request.kv_transfer_params)
        self._refuse_load(RequestId(request.request_id), reason, leg_id)

    def _refuse_load(self, request: RequestId, reason: str, leg_id: str) -> None:
        self._stats.count("rejected_params")
        _log.warning("kv_transfer_params refused request=%s reason=%s", request, reason)
        if self._config.kv_transfer.kv_load_failure_policy is FailurePolicy.FAIL:
            self._loads.offer(request, LoadOffer(0, refusal=reason, leg_id=leg_id))
        else:
            self._publish_failure(leg_id, reason)

    def _publish_failure(self, leg_id: str, reason: str) -> None:
        """Let the router that chose `leg_id` ask why P's KV was not used."""
        if leg_id and self._side_channel is not None:
            self._side_channel.publish_failure(leg_id, reason)


def _shared_tokens(ticket: Ticket, request: Request) -> int:
    """How many leading tokens of the request have the same KV as the ticket's."""
    salt = request.cache_salt
    return 0 if salt is None else common_prefix(ticket.tokens, request.prompt_token_ids, salt)


def _no_wakeup() -> None:
    return None
