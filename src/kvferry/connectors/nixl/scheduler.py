"""The scheduler side of the pull and push connectors: issues tickets when requests finish, and
writes the commands for the transfer workers.

Where pull and push differ, its `PullMode` or `PushMode` acts (`transfer_mode.py`, `push_mode.py`).
As a consumer, it checks tickets when requests arrive (`loading.py`).

As a producer, the scheduler signs a ticket for every prefill leg. If the decode side retains
finished turns, it keeps the blocks of a finished turn for the next turn; a prefill side may fetch
the blocks before it computes the rest (`RetainedTurns`, docs/decisions/033-reuse.md).

Runs on the engine's main thread and never blocks.
"""

import logging
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from kvferry.connectors.contract import (
    KVCacheBlocks,
    KVConnectorHandshakeMetadata,
    KVConnectorOutput,
    Request,
    RequestStatus,
    SchedulerSide,
    Step,
)
from kvferry.connectors.nixl.loading import PeerLoads
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
from kvferry.connectors.nixl.tables import HeldBlocks, RetainedTurns
from kvferry.connectors.nixl.transfer_mode import PullMode, SchedulerContext
from kvferry.connectors.stats import SIDE_CHANNEL_METRIC, TransferStats
from kvferry.errors import ConfigError, LocalProtocolError
from kvferry.protocol.fingerprints import MAX_CHAIN_POINTS, Fingerprint, fingerprint
from kvferry.protocol.handshake import ServedEngine
from kvferry.protocol.tickets import MAX_TICKET_NAME_CHARS, NO_BLOCK, PushTicketKey, Ticket
from kvferry.types import Address, EngineId, RequestId
from kvferry.worker.commands import (
    AbandonLease,
    EvictTurn,
    GrantLease,
    PrepareLoad,
    ReleaseTicket,
    RevokeLease,
)
from kvferry.worker.side_channel import EndedTurn, SideChannel

_log = logging.getLogger(__name__)


class NixlConnectorScheduler(SchedulerSide):
    """The state and decisions of a connector in the process that schedules."""

    def __init__(self, context: SchedulerContext, mode: PullMode) -> None:
        self._context = context
        self._mode = mode
        self._loads = PeerLoads(context, mode)
        self._held = HeldBlocks()
        self._retained = RetainedTurns()
        self._live: set[RequestId] = set()
        self._outdated: set[RequestId] = set()
        """Live requests that arrived before the last reset: their KV may be of older weights."""
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
        parts = self._checked(metadata)
        registration = next(iter(parts.values())).registration
        self._context.epoch = registered_epoch(self._context.config.epoch, registration)
        self._context.uses_host_buffer = any(part.uses_host_buffer for part in parts.values())
        served = ServedEngine(
            EngineId(self._context.engine_id),
            self._context.epoch,
            dict(next(iter(parts.values())).factors),
            {rank: part.layout for rank, part in parts.items()},
        )
        if self._context.side_channel is not None:
            self._context.side_channel.serve(served)
            _log.info("side channel serves another epoch epoch=%s", served.epoch)
            return
        control = self._context.config.kit.side_channel()
        address = Address.parse(control.address.removeprefix("tcp://"))
        assert address is not None
        self._context.address = address
        keys = (self._context.key, PushTicketKey(self._context.config.secret))
        self._context.side_channel = SideChannel(control, served, keys, lambda: self._wake_engine())
        self._context.side_channel.start()
        self._context.stats.data[SIDE_CHANNEL_METRIC] = str(self._context.address)
        _log.info(
            "side channel open address=%s engine=%s epoch=%s",
            control.address,
            served.engine,
            served.epoch,
        )

    def _checked(
        self, metadata: Mapping[int, KVConnectorHandshakeMetadata]
    ) -> dict[int, NixlHandshakeMetadata]:
        """The handshake data of the ranks, if the ranks agree with this scheduler."""
        parts = {
            rank: part for rank, part in metadata.items() if isinstance(part, NixlHandshakeMetadata)
        }
        for rank, part in metadata.items():
            if rank not in parts:
                raise LocalProtocolError(
                    f"rank {rank} sent {type(part).__name__} instead of NixlHandshakeMetadata; "
                    "the scheduler and all ranks must use the same connector"
                )
        foreign_ranks = [
            rank for rank, part in parts.items() if part.epoch != self._context.config.epoch
        ]
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
        return parts

    def shutdown(self) -> None:
        if self._context.side_channel is not None:
            self._context.side_channel.close()

    # -- consumer --

    def expect_request(self, request: Request) -> None:
        """Note a request whose ticket cannot be read yet, because the version of this engine's
        weights is unknown: its peer must neither give up the request nor free its blocks meanwhile.
        """
        role = read_params(request.kv_transfer_params)
        match role:
            case PrefillForPeer():
                self._mode.announce_prefill_leg(request, role)
            case LoadFromPeer(ticket=text, push_ticket=None) if (
                self._context.is_consumer and self._context.is_ticket_of_peer(text)
            ):
                # `on_new_request` repeats the command, which then changes nothing.
                self._context.send(PrepareLoad(RequestId(request.request_id), str(text)))

    def on_new_request(self, request: Request) -> None:
        self._live.add(RequestId(request.request_id))
        role = read_params(request.kv_transfer_params)
        match role:
            case LoadFromPeer() if not self._context.is_consumer:
                # An engine protects blocks against early reuse while bytes may arrive only if its
                # role is consumer.
                self._loads.refuse(
                    request,
                    "the kv_role of this engine does not allow it to load KV from a peer; start "
                    "the engine with kv_role kv_both or kv_consumer",
                )
            case LoadFromPeer():
                self._loads.plan(request, role)
            case PrefillForPeer(ticket=text) if not self._context.is_producer:
                # A router presented the conversation's only ticket to an engine that may not use
                # it.
                if self._context.is_ticket_of_peer(text):
                    self._context.return_ticket(RequestId(request.request_id), text)
                # Computing the prefill and issuing no ticket would hide the mistake: the decode
                # side would compute every such prompt a second time.
                self._loads.refuse(
                    request,
                    "the kv_role of this engine does not allow it to prefill for a peer; start "
                    "the engine with kv_role kv_both or kv_producer",
                )
            case PrefillForPeer(ticket=text) if text is not None:
                self._loads.plan_reuse(request, text)
            case BadParams(reason):
                self._loads.refuse(request, reason)
        if isinstance(role, PrefillForPeer):
            self._mode.add_prefill_leg(request, role)
        leg_id = read_leg_id(request.kv_transfer_params)
        self._loads.set_leg_id(RequestId(request.request_id), leg_id)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self._loads.find(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        self._loads.begin(request, blocks, num_external_tokens)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Process the requests that ended on every rank."""
        metadata = connector_output.kv_connector_worker_meta
        if isinstance(metadata, NixlWorkerMetadata):
            self._loads.take_worker_metadata(metadata)
            for name in metadata.being_read:
                self._retained.note_being_read(RequestId(name))
        self._loads.take_results(connector_output)
        for request in connector_output.finished_sending:
            self._end_lease(RequestId(request))
            self._mode.end_lease(RequestId(request))
        if connector_output.finished_sending:
            self._report_held_blocks()

    # -- producer --

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        request_id = RequestId(request.request_id)
        self._loads.finish_request(request_id)
        role = read_params(request.kv_transfer_params)
        params = self._hold_blocks(request, role, block_ids)
        self._live.discard(request_id)
        self._outdated.discard(request_id)
        if isinstance(role, PrefillForPeer):
            self._mode.finish_prefill_leg(request, role, params)
        elif params is None and isinstance(role, LoadFromPeer | NoTransfer):
            self._publish_turn(EndedTurn(role.turn_id or ""))
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
        turn_id = role.turn_id if isinstance(role, LoadFromPeer | NoTransfer) else None
        retains_turns = self._context.extra.bidirectional_kv_xfer and self._context.is_producer
        is_turn = turn_id is not None and retains_turns and request.family is None
        if not is_whole or not (is_turn or isinstance(role, PrefillForPeer)):
            return None
        num_tokens, salt = request.num_computed_tokens, request.cache_salt
        if len(request_id) > MAX_TICKET_NAME_CHARS:
            _log.warning(
                "no ticket issued: the request id is longer than %d characters request=%.80s…",
                MAX_TICKET_NAME_CHARS,
                request_id,
            )
            return None
        if (
            num_tokens == 0
            or self._context.address is None
            or request_id in self._outdated
            or not self._context.is_producer
            or salt is None
        ):
            return None
        held = self._context.cache.block_lists(block_ids, num_tokens)
        all_tokens = request.all_token_ids[:num_tokens]
        num_held = sum(block != NO_BLOCK for group in held for block in group)
        if turn_id is not None:
            tokens = fingerprint(all_tokens, self._context.cache.block_size, salt, MAX_CHAIN_POINTS)
            params = self._retain(request, held, tokens, turn_id)
            self._retained.retain(request_id, num_held, turn_id)
        else:
            tokens = fingerprint(all_tokens, self._context.cache.block_size, salt)
            serial = self._mode.grant_lease(request_id, held)
            ticket = self._context.ticket(request, serial, held, tokens)
            params = self._mode.ticket_params(ticket)
            self._held.hold(request_id, num_held, request.family)
            self._publish_leg(request, ticket)
        self._report_held_blocks()
        return params

    def _retain(
        self, request: Request, blocks: tuple[list[int], ...], tokens: Fingerprint, turn_id: str
    ) -> dict[str, Any]:
        """Command the transfer workers to retain a finished turn's blocks, and return the
        parameters for the next turn.
        """
        lease_ttl_s = self._context.extra.decoder_kv_blocks_ttl
        serial = self._context.next_serial()
        copied = self._context.blocks_to_copy(blocks)
        self._context.send(GrantLease(RequestId(request.request_id), serial, copied, lease_ttl_s))
        ticket = self._context.ticket(request, serial, blocks, tokens)
        params = self._mode.ticket_params(ticket) | {
            "do_remote_prefill": False,
            "do_remote_decode": True,
            "ttl_s": lease_ttl_s,
        }
        self._context.stats.count("retained_turns")
        self._publish_turn(EndedTurn(turn_id, msgspec.json.encode(params).decode(), lease_ttl_s))
        return params

    def _publish_turn(self, turn: EndedTurn) -> None:
        """Let routers ask for an ended turn, unless no router has named it."""
        if turn.turn_id and self._context.side_channel is not None:
            self._context.side_channel.publish_turn(turn)

    def _publish_leg(self, request: Request, ticket: Ticket) -> None:
        """Let the router release the ticket of a prefill leg even if the answer that carries the
        ticket does not reach the router.
        """
        leg_id = read_leg_id(request.kv_transfer_params)
        if leg_id and self._context.side_channel is not None:
            self._context.side_channel.publish_leg(
                leg_id, ReleaseTicket(ticket.lease, ticket.serial)
            )

    def reclaim_blocks(self, num_blocks: int) -> None:
        """Evict the oldest retained turns, because the engine lacks `num_blocks` blocks."""
        for request in self._retained.evict(num_blocks):
            self._context.stats.count("retained_turns_evicted")
            self._context.send(EvictTurn(request))

    def has_pending_block_frees(self) -> bool:
        return self._retained.has_evicting

    def reset_cache(self) -> None:
        """Drop all KV, because the engine's weights may have changed. No request that is live now
        loads KV from a peer or offers its KV to one.
        """
        self._outdated |= self._live
        self._loads.reset()
        for request in (*self._held.requests, *self._retained.evict_all()):
            self._context.send(RevokeLease(request))
        self._mode.drop_prefill_legs(
            "the prefill side's weights may have changed while it computed the prompt"
        )

    def set_weights_version(self, version: str) -> None:
        self._context.weights = version

    def _end_lease(self, request: RequestId) -> None:
        """Process the end of a lease, which has ended on every rank."""
        turn_id = self._retained.end(request)
        if turn_id is not None:
            self._publish_turn(EndedTurn(turn_id))
        else:
            self._context.send(*map(AbandonLease, self._held.free(request)))

    def _report_held_blocks(self) -> None:
        self._context.stats.set_level("num_held_blocks", "scheduler", self._held.num_blocks)
        self._context.stats.set_level("num_retained_turns", "scheduler", len(self._retained))
        self._context.stats.set_level("num_retained_blocks", "scheduler", self._retained.num_blocks)

    def request_abandoned(self, request_id: str) -> None:
        self._context.send(AbandonLease(RequestId(request_id)))

    # -- every step --

    def has_pending_push_work(self) -> bool:
        return bool(self._context.commands) or (
            self._context.side_channel is not None and self._context.side_channel.has_released
        )

    def build_connector_meta(self, scheduler_output: Step) -> NixlConnectorMetadata:
        self._mode.plan_step(scheduler_output.slices)
        if self._context.side_channel is not None:
            self._context.send(*self._context.side_channel.take_released())
        commands, self._context.commands = tuple(self._context.commands), []
        optional = self._loads.take_started_optional()
        return NixlConnectorMetadata(commands, optional)

    def needs_slices(self, request_id: str) -> bool:
        return self._mode.needs_slices(RequestId(request_id))

    def get_kv_connector_stats(self) -> TransferStats | None:
        if self._context.side_channel is not None and (
            dropped := self._context.side_channel.take_num_dropped()
        ):
            self._context.stats.count("dropped_messages", dropped)
        return self._context.stats.drain()


def _no_wakeup() -> None:
    return None
