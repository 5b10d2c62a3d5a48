"""Which tokens a request loads from a peer: the consumer's part of the scheduler side.

A ticket is usable as far as its fingerprint and the request's own prompt have a common prefix. So a
ticket for another prompt can never be used for this one. Requests that share a ticket (the n
choices of one client request) read the KV once: the later requests wait for the first request and
then find its blocks in the engine's own prefix cache.

Runs on the engine's main thread and never blocks.
"""

import logging
from dataclasses import dataclass, field, replace

from kvferry.config import NixlExtraConfig
from kvferry.connectors.contract import (
    ConnectorConfig,
    KVCacheBlocks,
    KVCacheConfig,
    KVConnectorOutput,
    Request,
)
from kvferry.connectors.nixl.metadata import NixlWorkerMetadata
from kvferry.connectors.nixl.params import LoadFromPeer, read_leg_id
from kvferry.connectors.nixl.tables import LoadOffer, LoadTable, SharedTicketKey
from kvferry.connectors.nixl.transfer_mode import (
    LoadByTicket,
    LoadPlan,
    LoadRefusal,
    TicketIssuer,
    TransferMode,
)
from kvferry.connectors.stats import TransferStats
from kvferry.errors import InvalidTicket
from kvferry.protocol.fingerprints import common_prefix
from kvferry.protocol.tickets import HOLE, Ticket
from kvferry.types import FailurePolicy, RequestId
from kvferry.worker.commands import (
    AbortLoad,
    PrepareLoad,
    RejectLoad,
    ReleaseTicket,
    SkipLoad,
    StartLoad,
    WorkerCommand,
)
from kvferry.worker.side_channel import SideChannel

_WEIGHTS_CHANGED = (
    "this engine's weights may have changed since the request arrived; send the request again"
)

_TOO_LATE = (
    "ticket not used request=%s reason=another request of the same prompt reads its states or has "
    "read them; this engine computes the prompt"
)

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class SchedulerContext:
    """What the two parts of the scheduler side share."""

    config: ConnectorConfig
    cache: KVCacheConfig
    extra: NixlExtraConfig
    issuer: TicketIssuer
    mode: TransferMode
    commands: list[WorkerCommand] = field(default_factory=list, init=False)
    """For the transfer workers, with the next step."""
    stats: TransferStats = field(default_factory=TransferStats, init=False)
    side_channel: SideChannel | None = field(default=None, init=False)

    def is_ticket_of_peer(self, text: object) -> bool:
        try:
            return self.issuer.key.open(text).engine != self.config.kv_transfer.engine_id
        except InvalidTicket:
            return False

    def return_ticket(self, request: RequestId, text: object) -> None:
        """Let the peer that issued a ticket free its blocks now: the ticket is not used."""
        self.commands += [PrepareLoad(request, str(text)), SkipLoad(request)]


class PeerLoads:
    """The loads of this engine's requests, from the ticket to the end of the load."""

    def __init__(self, context: SchedulerContext) -> None:
        self._context = context
        self._loads = LoadTable()
        self._started_optional: list[RequestId] = []
        """The optional loads that start in the next step."""

    # -- tickets --

    def plan(self, request: Request, role: LoadFromPeer) -> None:
        """Decide what the request may load."""
        match self._context.mode.plan_load(request, role):
            case LoadByTicket(text):
                self._take_ticket(request, text)
            case LoadRefusal(reason):
                self.refuse(request, reason)
            case LoadPlan(_, LoadOffer(ticket=key)) if self._comes_too_late(key):
                _log.info(_TOO_LATE, request.request_id)
            case LoadPlan(commands, offer):
                self._context.commands += commands
                if offer is not None:
                    self._loads.offer(RequestId(request.request_id), offer)

    def _take_ticket(self, request: Request, text: object) -> None:
        request_id = RequestId(request.request_id)
        try:
            ticket = self._context.issuer.key.open(text)
        except InvalidTicket as error:
            self.refuse(request, str(error))
            return
        if ticket.engine == self._context.config.kv_transfer.engine_id:
            self._take_own_ticket(ticket)
            return
        if ticket.weights != self._context.issuer.weights:
            self._context.return_ticket(request_id, text)
            self.refuse(request, self._describe_other_weights(ticket))
            return
        shared = _shared_tokens(ticket, request)
        matched = self._usable(ticket, shared, request.num_prompt_tokens)
        if not matched:
            self._context.stats.count("unmatched_tickets")
            reason = (
                f"its states are those after {ticket.num_tokens} tokens, of which the "
                f"{request.num_prompt_tokens} tokens of the prompt begin with {shared}"
                if self._context.cache.has_states and shared
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
        self._context.commands.append(PrepareLoad(request_id, str(text)))

    def plan_reuse(self, request: Request, text: object) -> None:
        """Offer a turn that a decode side may have retained. Whatever is wrong with the ticket, the
        engine computes the request.
        """
        request_id = RequestId(request.request_id)
        try:
            ticket = self._context.issuer.key.open(text)
        except InvalidTicket as error:
            self._skip_reuse(request_id, "invalid", str(error))
            return
        if ticket.engine == self._context.config.kv_transfer.engine_id:
            self._skip_reuse(request_id, "own", "this engine itself retains the turn")
            self._take_own_ticket(ticket)
            return
        if ticket.weights != self._context.issuer.weights:
            self._context.return_ticket(request_id, text)
            self._skip_reuse(request_id, "other_tokens", self._describe_other_weights(ticket))
            return
        matched = self._usable(ticket, _shared_tokens(ticket, request), request.num_prompt_tokens)
        min_tokens = max(1, self._context.extra.kv_recompute_threshold)
        context = self._context
        is_consumer = context.config.kv_transfer.is_kv_consumer
        if not (context.extra.bidirectional_kv_xfer and is_consumer):
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
        self._context.return_ticket(request_id, text)

    # -- the engine's questions --

    def find(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens the request can load, as `get_num_new_matched_tokens` answers."""
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
            self._context.commands.append(
                PrepareLoad(request_id, offer.unchecked_ticket, is_optional=True)
            )
            offer = replace(
                offer, unchecked_ticket="", num_pending_ranks=self._context.config.parallel.tp_size
            )
        self._loads.offer(request_id, offer)
        if offer.num_pending_ranks or (
            self._reads_once and self._loads.is_being_read(offer.ticket)
        ):
            return None, False
        return missing, True

    def begin(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Begin the request's load into its blocks, or give up its offer."""
        request_id = RequestId(request.request_id)
        offer = self._loads.withdraw(request_id)
        if offer is None:
            return
        if num_external_tokens == 0:
            # The producer waits for a reader of each ticket: `PrepareLoad` then `SkipLoad` ends the
            # lease early.
            if offer.unchecked_ticket:
                self._context.commands.append(PrepareLoad(request_id, offer.unchecked_ticket))
            if offer.refusal is None:
                self._context.commands.append(SkipLoad(request_id))
            if offer.is_optional:
                self._context.stats.count("reuse_skipped_few_tokens")
            return
        self._loads.begin(request_id, offer)
        if offer.is_optional:
            self._started_optional.append(request_id)
        if offer.refusal is not None:
            self._context.commands.append(RejectLoad(request_id, offer.refusal))
            return
        first = offer.num_local_tokens
        if first is None:
            first = offer.num_tokens - num_external_tokens
        # An engine may take fewer tokens than offered, but never other tokens.
        end = min(first + num_external_tokens, offer.num_tokens)
        table = tuple(map(tuple, self._context.cache.block_lists(blocks.get_block_ids(), end)))
        if self._context.cache.has_states and end != offer.num_tokens:
            reason = (
                f"this engine asked for the KV of {end} tokens, but the states that the prefill "
                f"side holds are those after {offer.num_tokens} tokens"
            )
            self._context.commands.append(RejectLoad(request_id, reason))
            return
        if any(
            group.is_state and blocks_of[-1] == HOLE
            for group, blocks_of in zip(self._context.cache.groups, table, strict=True)
        ):
            reason = f"this engine has no block for the states after {end} tokens"
            self._context.commands.append(RejectLoad(request_id, reason))
            return
        needed_from = tuple(group.first_visible_token(end) for group in self._context.cache.groups)
        self._context.commands.append(StartLoad(request_id, table, first, end, needed_from))

    def take_results(self, output: KVConnectorOutput) -> None:
        """End the loads that have ended on every rank."""
        for request in map(RequestId, output.finished_recving):
            if self._loads.is_loading(request):
                is_good = request not in output.failed_recving
                self._context.stats.count("finished_loads" if is_good else "failed_loads")
                if self._loads.is_optional(request):
                    self._context.stats.count("reuse_loads" if is_good else "reuse_failed_loads")
                self._loads.end(request, is_good)

    def take_started_optional(self) -> frozenset[str]:
        started, self._started_optional = frozenset(self._started_optional), []
        return started

    def is_optional(self, request: RequestId) -> bool:
        return self._loads.is_optional(request)

    def finish_request(self, request: RequestId) -> None:
        if self._loads.finish_request(request):
            self._context.commands.append(AbortLoad(request))

    def reset(self) -> None:
        """Load nothing more for the requests that are live now."""
        for request, offer in self._loads.withdraw_all().items():
            if offer.unchecked_ticket:
                self._context.commands.append(PrepareLoad(request, offer.unchecked_ticket))
            self._context.commands.append(SkipLoad(request))
            if not offer.is_optional:
                self._refuse_load(request, _WEIGHTS_CHANGED, offer.leg_id)
        # If a load ends before the command arrives, the engine computes the request.
        self._context.commands += [
            AbortLoad(request, _WEIGHTS_CHANGED) for request in self._loads.loading
        ]

    def take_worker_metadata(self, worker_metadata: NixlWorkerMetadata) -> None:
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
                self._context.commands.append(SkipLoad(request))
        for request, reason in (
            (RequestId(name), reason) for name, reason in worker_metadata.failed.items()
        ):
            self._publish_failure(self._loads.leg_id(request), reason)

    # -- inside --

    def _skip_reuse(self, request: RequestId, why: str, reason: str) -> None:
        self._context.stats.count(f"reuse_skipped_{why}")
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
        if not self._context.cache.leaves_last_token:
            return matched
        matched = min(matched, num_prompt_tokens - 1)
        if self._context.cache.has_states and matched != ticket.num_tokens:
            return 0
        needed = -(-matched // ticket.block_size)
        for group, blocks in zip(self._context.cache.groups, ticket.block_ids(), strict=False):
            if HOLE in blocks[group.first_visible_token(matched) // ticket.block_size : needed]:
                return 0
        return matched

    @property
    def _reads_once(self) -> bool:
        """Whether one of the requests that share a ticket reads, and the others find its blocks in
        the engine's prefix cache. That cache keeps no states at the end of a prompt.
        """
        return not self._context.cache.has_states

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
        if ticket.epoch == self._context.issuer.epoch:
            self._context.commands.append(ReleaseTicket(ticket.lease, ticket.serial))

    def _describe_other_weights(self, ticket: Ticket) -> str:
        return (
            f"{ticket.engine} computed the KV with other weights (version "
            f"{ticket.weights or 'of its start'}) than this engine has (version "
            f"{self._context.issuer.weights or 'of its start'}); load the same weights into both "
            "engines and reset the caches of both"
        )

    def set_leg_id(self, request: RequestId, leg_id: str) -> None:
        if leg_id and (offer := self._loads.get(request)) is not None:
            self._loads.offer(request, replace(offer, leg_id=leg_id))

    def refuse(self, request: Request, reason: str) -> None:
        leg_id = read_leg_id(request.kv_transfer_params)
        self._refuse_load(RequestId(request.request_id), reason, leg_id)

    def _refuse_load(self, request: RequestId, reason: str, leg_id: str) -> None:
        self._context.stats.count("rejected_params")
        _log.warning("kv_transfer_params refused request=%s reason=%s", request, reason)
        if self._context.config.kv_transfer.kv_load_failure_policy is FailurePolicy.FAIL:
            self._loads.offer(request, LoadOffer(0, refusal=reason, leg_id=leg_id))
        else:
            self._publish_failure(leg_id, reason)

    def _publish_failure(self, leg_id: str, reason: str) -> None:
        """Let the router that chose `leg_id` ask why P's KV was not used."""
        if leg_id and self._context.side_channel is not None:
            self._context.side_channel.publish_failure(leg_id, reason)


def _shared_tokens(ticket: Ticket, request: Request) -> int:
    """How many leading tokens of the request have the same KV as the ticket's."""
    salt = request.cache_salt
    return 0 if salt is None else common_prefix(ticket.tokens, request.prompt_token_ids, salt)
