"""The pull connector in the process that schedules: checks tickets on arrival, issues them at the end, and writes the ferries' commands.

As a consumer it decides how many tokens a ticket is good for: the common prefix of the ticket's fingerprint and the request's own prompt,
nothing more, so parameters of another prompt can never be used for this one. Requests that share a ticket (one client's n choices) read
it once: the others wait for the first and then find its blocks in the engine's own cache. As a producer it signs a ticket for every
prefill it was asked to hand over. Runs on the engine's main thread; never waits.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
from kvferry.connectors.params import BadParams, PrefillForPeer, PullFromPeer, read_params
from kvferry.connectors.pull_metadata import PullHandshakeMetadata, PullMetadata
from kvferry.connectors.shared_tickets import SharedTickets, TicketName
from kvferry.connectors.stats import TransferStats
from kvferry.errors import ConfigError, InvalidTicket, LocalProtocolError
from kvferry.ferry.commands import Abandon, Abort, Command, Grant, HandBack, Reject, Settle, Start, Track
from kvferry.ferry.side_channel import SideChannel
from kvferry.protocol.fingerprints import Fingerprint, common_prefix, fingerprint
from kvferry.protocol.handshake import ServedEngine
from kvferry.protocol.tickets import HOLE, MAX_NAME_CHARS, Ticket, TicketKey, runs_from_blocks
from kvferry.types import Address, EngineId, Epoch, FailurePolicy, RequestId

__all__ = ["PullOffer", "PullScheduler"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PullOffer:
    """What a waiting request may load: the first `num_tokens` tokens of its prompt, or nothing, for this reason."""

    num_tokens: int
    ticket: TicketName | None = None
    refusal: str | None = None


class PullScheduler:
    def __init__(self, config: ConnectorConfig, cache: KVCacheConfig, extra: NixlExtraConfig) -> None:
        self._config = config
        self._cache = cache
        self._extra = extra
        self._key = TicketKey(config.secret)
        self._serial = 0
        self._offers: dict[RequestId, PullOffer] = {}
        self._asked: dict[RequestId, int] = {}
        """How many tokens of it the engine had when it was last made an offer."""
        self._tickets = SharedTickets()
        self._held = HeldBlocks()
        self._commands: list[Command] = []
        self._side_channel: SideChannel | None = None
        self._address: Address | None = None
        self._is_staged = False
        self._stats = TransferStats()
        self._wake_engine: Callable[[], None] = _nobody
        self._warn_of_unused_settings()

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
                "give all of them the same KVFERRY_VLLM_EPOCH, another one at each start"
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
        self._address = Address(host.strip("[]"), int(port))
        self._side_channel = SideChannel(control, served, self._key, lambda: self._wake_engine())
        self._side_channel.start()
        _log.info("side channel open address=%s engine=%s epoch=%s", control.address, served.engine, served.epoch)

    def _warn_of_unused_settings(self) -> None:
        """Settings of later features are accepted, because known commands carry them; nobody shall believe they are in effect."""
        if self._extra.bidirectional_kv_xfer:
            _log.warning("setting has no effect yet setting=bidirectional_kv_xfer")

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
            case PrefillForPeer() if not self._config.kv_transfer.is_kv_producer:
                # Computed in silence, its KV would be computed a second time by whoever was to fetch it, request after request.
                self._refuse(request, "this engine hands no KV to others; start it with kv_role kv_both or kv_producer")
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
        if missing <= 0:
            return 0, False
        return (None, False) if self._tickets.is_being_read(offer.ticket) else (missing, True)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        request_id = RequestId(request.request_id)
        offer = self._offers.pop(request_id, None)
        if offer is None:
            return
        first = self._asked.pop(request_id, offer.num_tokens - num_external_tokens)
        if num_external_tokens == 0:
            if offer.refusal is None:
                self._commands.append(Settle(request_id))
            return
        self._tickets.begin(request_id, offer.ticket)
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
        for request in output.finished_recving:
            if self._tickets.is_loading(RequestId(request)):
                is_good = request not in output.failed_recving
                self._stats.count("finished_pulls" if is_good else "failed_pulls")
                self._tickets.end(RequestId(request), is_good)
        for request in output.finished_sending:
            self._commands += [Abandon(other) for other in self._held.free(RequestId(request))]
        if output.finished_sending:
            self._note_held()

    # -- producer --------------------------------------------------------------------------------------------------

    def request_finished(self, request: Request, block_ids: tuple[list[int], ...]) -> tuple[bool, dict[str, Any] | None]:
        request_id = RequestId(request.request_id)
        self._asked.pop(request_id, None)
        if self._offers.pop(request_id, None) is not None or self._tickets.is_loading(request_id):
            self._commands.append(Abort(request_id))
        is_whole = request.status in (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)
        if not is_whole or not isinstance(read_params(request.kv_transfer_params), PrefillForPeer):
            return False, None
        num_tokens = request.num_computed_tokens
        if len(request_id) > MAX_NAME_CHARS:
            _log.warning("not handed over: its id is longer than %d characters request=%.80s…", MAX_NAME_CHARS, request_id)
            return False, None
        if num_tokens == 0 or self._address is None or not self._config.kv_transfer.is_kv_producer:
            return False, None
        num_blocks = -(-num_tokens // self._cache.block_size)
        held = tuple(group[:num_blocks] for group in block_ids)
        ticket = self._issue(request, held, num_tokens)
        self._held.hold(request_id, sum(block != HOLE for group in held for block in group), request.family)
        self._note_held()
        return True, self._params(ticket)

    def _note_held(self) -> None:
        self._stats.set_level("num_held_blocks", "scheduler", self._held.num_blocks)

    def request_abandoned(self, request_id: str) -> None:
        self._commands.append(Abandon(RequestId(request_id)))

    def _issue(self, request: Request, blocks: tuple[list[int], ...], num_tokens: int) -> Ticket:
        tokens = fingerprint(request.all_token_ids[:num_tokens], self._cache.block_size, request.cache_salt)
        return self._ticket(request, self._grant(RequestId(request.request_id), blocks), blocks, tokens)

    def _grant(self, request: RequestId, blocks: tuple[list[int], ...]) -> int:
        """Let ferries lease the blocks; the serial of that lease."""
        self._serial += 1
        copied = tuple(map(tuple, blocks)) if self._is_staged else ()
        self._commands.append(Grant(request, self._serial, copied))
        return self._serial

    def _ticket(self, request: Request, serial: int, blocks: Sequence[Sequence[int]], tokens: Fingerprint) -> Ticket:
        assert self._address is not None
        return Ticket(
            engine=self._config.kv_transfer.engine_id,
            epoch=self._config.epoch,
            request=request.request_id,
            serial=serial,
            host=self._address.host,
            port=self._address.port,
            tp_size=self._config.parallel.tp_size,
            block_size=self._cache.block_size,
            block_runs=[runs_from_blocks(group) for group in blocks],
            tokens=tokens,
            ttl_s=self._extra.kv_lease_duration,
        )

    def _params(self, ticket: Ticket) -> dict[str, Any]:
        """The keys of vLLM's connector, for routers that look at them, and the ticket, which is all we look at."""
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [[block for block in group if block != HOLE] for group in ticket.block_ids()],
            "remote_engine_id": ticket.engine,
            "remote_request_id": ticket.request,
            "remote_host": ticket.host,
            "remote_port": ticket.port,
            "tp_size": ticket.tp_size,
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": ticket.num_tokens,
            "remote_blocks_expiry_time": None,
            "transfer_mode": "pull",
            "ticket": self._key.sign(ticket),
        }

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
