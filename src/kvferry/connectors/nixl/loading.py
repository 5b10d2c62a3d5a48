"""Which tokens a request loads from a peer: the consumer's part of the scheduler side.

A ticket is usable as far as its fingerprint and the request's own prompt have a common prefix. So a
ticket for another prompt can never be used for this one. Requests that share a ticket (the n
choices of one client request) read the KV once: the later requests wait for the first request and
then find its blocks in the engine's own prefix cache.

Runs on the engine's main thread and never blocks.
"""

import logging
from collections import Counter
from dataclasses import dataclass, replace

from kvferry.connectors.contract import KVCacheBlocks, KVConnectorOutput, Request
from kvferry.connectors.nixl.metadata import NixlWorkerMetadata
from kvferry.connectors.nixl.params import LoadFromPeer, read_leg_id
from kvferry.connectors.nixl.transfer_mode import (
    LoadOffer,
    LoadPlan,
    PullMode,
    SchedulerContext,
    SharedTicketKey,
)
from kvferry.errors import InvalidTicket
from kvferry.protocol.fingerprints import common_prefix
from kvferry.protocol.tickets import NO_BLOCK, Ticket
from kvferry.types import FailurePolicy, RequestId
from kvferry.worker.commands import (
    AbortLoad,
    PrepareLoad,
    RejectLoad,
    ReleaseTicket,
    SkipLoad,
    StartLoad,
)

# Bounds the memory for tickets that were read. A request whose ticket was forgotten reads the
# ticket again.
MAX_READ_TICKETS = 10_000

_WEIGHTS_CHANGED = (
    "this engine's weights may have changed since the request arrived; send the request again"
)

_TOO_LATE = (
    "ticket not used request=%s reason=another request of the same prompt reads its states or has "
    "read them; this engine computes the prompt"
)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _UnusableTicket:
    why: str
    """As in the counters `reuse_skipped_*`."""
    reason: str


class PeerLoads:
    """The loads of this engine's requests, from the ticket to the end of the load."""

    def __init__(self, context: SchedulerContext, mode: PullMode) -> None:
        self._context = context
        self._mode = mode
        self._offers: dict[RequestId, LoadOffer] = {}
        self._loading: dict[RequestId, LoadOffer] = {}
        """Requests with a load in progress, and the offers that were accepted. An offer without a
        ticket: the request only waits for its failure to be reported.
        """
        self._num_loading: Counter[SharedTicketKey | None] = Counter()
        """The number of loads in progress by ticket."""
        self._read: dict[SharedTicketKey, None] = {}
        """The tickets that were read, in the order of the reads."""
        self._started_optional: list[RequestId] = []
        """The optional loads that start in the next step."""

    # -- tickets --

    def plan(self, request: Request, role: LoadFromPeer) -> None:
        """Decide what the request may load."""
        try:
            plan = self._mode.plan_load(request, role)
        except InvalidTicket as error:
            self.refuse(request, str(error))
            return
        plan = plan or self._plan_by_ticket(request, role.ticket)
        if plan.offer is not None and self._comes_too_late(plan.offer.ticket):
            _log.info(_TOO_LATE, request.request_id)
            return
        self._context.send(*plan.commands)
        if plan.offer is not None:
            self._offers[RequestId(request.request_id)] = plan.offer

    def _plan_by_ticket(self, request: Request, text: object) -> LoadPlan:
        request_id = RequestId(request.request_id)
        ticket = self._open(request_id, text)
        if isinstance(ticket, _UnusableTicket):
            if ticket.why != "own":
                self.refuse(request, ticket.reason)
            return LoadPlan()
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
        return LoadPlan((PrepareLoad(request_id, str(text)),), LoadOffer(matched, _key_of(ticket)))

    def plan_reuse(self, request: Request, text: object) -> None:
        """Offer a turn that a decode side may have retained. Whatever is wrong with the ticket, the
        engine computes the request.
        """
        request_id = RequestId(request.request_id)
        ticket = self._open(request_id, text)
        if isinstance(ticket, _UnusableTicket):
            self._skip_reuse(request_id, ticket.why, ticket.reason)
            return
        matched = self._usable(ticket, _shared_tokens(ticket, request), request.num_prompt_tokens)
        min_tokens = max(1, self._context.extra.kv_recompute_threshold)
        if not (self._context.extra.bidirectional_kv_xfer and self._context.is_consumer):
            why = "off"
            reason = (
                "this engine does not load retained turns; set bidirectional_kv_xfer, and kv_role "
                "kv_both"
            )
        elif matched < min_tokens:
            why = "few_tokens" if matched else "other_tokens"
            reason = (
                f"{matched} tokens of the prompt can be loaded from it, fewer than {min_tokens}"
            )
        else:
            self._offers[request_id] = LoadOffer(
                matched,
                _key_of(ticket),
                min_tokens=min_tokens,
                is_optional=True,
                unchecked_ticket=str(text),
            )
            return
        self._skip_reuse(request_id, why, reason)
        self._context.return_ticket(request_id, text)

    def _open(self, request: RequestId, text: object) -> Ticket | _UnusableTicket:
        """Open and check a request's ticket. The lease of an intact ticket that this engine must
        not use ends at once.
        """
        context = self._context
        try:
            ticket = context.key.open(text)
        except InvalidTicket as error:
            return _UnusableTicket("invalid", str(error))
        if ticket.engine == context.engine_id:
            # A router chose this engine for both legs: the blocks are in the engine's own prefix
            # cache, and an engine never connects to itself.
            if ticket.epoch == context.epoch:
                context.send(ReleaseTicket(ticket.lease, ticket.serial))
            return _UnusableTicket("own", "this engine itself retains the turn")
        if ticket.weights != context.weights:
            context.return_ticket(request, text)
            return _UnusableTicket(
                "other_tokens",
                f"{ticket.engine} computed the KV with other weights (version "
                f"{ticket.weights or 'of its start'}) than this engine has (version "
                f"{context.weights or 'of its start'}); load the same weights into both engines "
                "and reset the caches of both",
            )
        return ticket

    # -- the engine's questions --

    def find(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens the request can load, as `get_num_new_matched_tokens` answers."""
        request_id = RequestId(request.request_id)
        offer = self._offers.get(request_id)
        if offer is None or (self._reads_once and offer.ticket in self._read):
            return 0, False
        # A refused request claims its whole prompt, so that the engine waits for the load and then
        # handles the failure on the ordinary path of a failed load.
        end = request.num_prompt_tokens if offer.refusal is not None else offer.num_tokens
        missing = end - num_computed_tokens
        offer = replace(offer, num_local_tokens=num_computed_tokens)
        if missing < offer.min_tokens:
            self._offers[request_id] = offer
            return 0, False
        if offer.unchecked_ticket:
            # Ask the retaining engine for a reservation only now that the engine tries to schedule
            # the request: until then the retaining engine may need the blocks itself.
            self._context.send(PrepareLoad(request_id, offer.unchecked_ticket, is_optional=True))
            offer = replace(
                offer, unchecked_ticket="", num_pending_ranks=self._context.config.parallel.tp_size
            )
        self._offers[request_id] = offer
        if offer.num_pending_ranks or (self._reads_once and self._is_being_read(offer.ticket)):
            return None, False
        return missing, True

    def begin(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Begin the request's load into its blocks, or give up its offer."""
        request_id = RequestId(request.request_id)
        offer = self._offers.pop(request_id, None)
        if offer is None:
            return
        if num_external_tokens == 0:
            self._give_up(request_id, offer)
            if offer.is_optional:
                self._context.stats.count("reuse_skipped_few_tokens")
            return
        self._loading[request_id] = offer
        self._num_loading[offer.ticket] += 1
        if offer.is_optional:
            self._started_optional.append(request_id)
        self._context.send(self._start(request_id, offer, blocks, num_external_tokens))

    def _give_up(self, request: RequestId, offer: LoadOffer) -> None:
        """Let the producer free the blocks of an offer that is not used."""
        if offer.unchecked_ticket:
            self._context.return_ticket(request, offer.unchecked_ticket)
        elif offer.refusal is None:
            self._context.send(SkipLoad(request))

    def _start(
        self, request: RequestId, offer: LoadOffer, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> StartLoad | RejectLoad:
        if offer.refusal is not None:
            return RejectLoad(request, offer.refusal)
        cache, first = self._context.cache, offer.num_local_tokens
        if first is None:
            first = offer.num_tokens - num_external_tokens
        # An engine may take fewer tokens than offered, but never other tokens.
        end = min(first + num_external_tokens, offer.num_tokens)
        table = tuple(map(tuple, cache.block_lists(blocks.get_block_ids(), end)))
        if cache.has_states and end != offer.num_tokens:
            return RejectLoad(
                request,
                f"this engine asked for the KV of {end} tokens, but the states that the prefill "
                f"side holds are those after {offer.num_tokens} tokens",
            )
        if any(
            group.is_state and blocks_of[-1] == NO_BLOCK
            for group, blocks_of in zip(cache.groups, table, strict=True)
        ):
            return RejectLoad(
                request, f"this engine has no block for the states after {end} tokens"
            )
        needed_from = tuple(group.first_visible_token(end) for group in cache.groups)
        return StartLoad(request, table, first, end, needed_from)

    def take_results(self, output: KVConnectorOutput) -> None:
        """End the loads that have ended on every rank."""
        for request in map(RequestId, output.finished_recving):
            offer = self._loading.pop(request, None)
            if offer is None:
                continue
            self._num_loading[offer.ticket] -= 1
            if not self._num_loading[offer.ticket]:
                del self._num_loading[offer.ticket]
            is_good = request not in output.failed_recving
            self._context.stats.count("finished_loads" if is_good else "failed_loads")
            if offer.is_optional:
                self._context.stats.count("reuse_loads" if is_good else "reuse_failed_loads")
            # A failed load leaves the ticket unread, so that another request may try.
            if is_good and offer.ticket is not None:
                self._read[offer.ticket] = None
        while len(self._read) > MAX_READ_TICKETS:
            del self._read[next(iter(self._read))]

    def take_started_optional(self) -> frozenset[str]:
        started, self._started_optional = frozenset(self._started_optional), []
        return started

    def finish_request(self, request: RequestId) -> None:
        """Drop the offer of a finished request; a load in progress still ends with a result."""
        if self._offers.pop(request, None) is not None or request in self._loading:
            self._context.send(AbortLoad(request))

    def reset(self) -> None:
        """Load nothing more for the requests that are live now."""
        # A refusal stays: the engine has to report it.
        offers = {request: offer for request, offer in self._offers.items() if not offer.refusal}
        for request, offer in offers.items():
            del self._offers[request]
            self._give_up(request, offer)
            if not offer.is_optional:
                self._refuse_load(request, _WEIGHTS_CHANGED, offer.leg_id)
        # If a load ends before the command arrives, the engine computes the request.
        self._context.send(*(AbortLoad(request, _WEIGHTS_CHANGED) for request in self._loading))

    def take_worker_metadata(self, worker_metadata: NixlWorkerMetadata) -> None:
        for request, num_ranks in worker_metadata.reserved.items():
            offer = self._offers.get(RequestId(request))
            if offer is not None:
                num_pending = offer.num_pending_ranks - num_ranks
                self._offers[RequestId(request)] = replace(offer, num_pending_ranks=num_pending)
        # One refusing rank is enough: a load needs the blocks of all ranks.
        for request, reason in worker_metadata.refused.items():
            if self._offers.pop(RequestId(request), None) is not None:
                self._skip_reuse(RequestId(request), "refused", reason)
                self._context.send(SkipLoad(RequestId(request)))
        for request, reason in worker_metadata.failed.items():
            if (offer := self._loading.get(RequestId(request))) is not None:
                self._publish_failure(offer.leg_id, reason)

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
            if NO_BLOCK in blocks[group.first_visible_token(matched) // ticket.block_size : needed]:
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
        return not self._reads_once and (self._is_being_read(key) or key in self._read)

    def _is_being_read(self, key: SharedTicketKey | None) -> bool:
        return key is not None and self._num_loading[key] > 0

    def set_leg_id(self, request: RequestId, leg_id: str) -> None:
        if leg_id and (offer := self._offers.get(request)) is not None:
            self._offers[request] = replace(offer, leg_id=leg_id)

    def refuse(self, request: Request, reason: str) -> None:
        leg_id = read_leg_id(request.kv_transfer_params)
        self._refuse_load(RequestId(request.request_id), reason, leg_id)

    def _refuse_load(self, request: RequestId, reason: str, leg_id: str) -> None:
        self._context.stats.count("rejected_params")
        _log.warning("kv_transfer_params refused request=%s reason=%s", request, reason)
        if self._context.config.kv_transfer.kv_load_failure_policy is FailurePolicy.FAIL:
            self._offers[request] = LoadOffer(0, refusal=reason, leg_id=leg_id)
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


def _key_of(ticket: Ticket) -> SharedTicketKey:
    return ticket.engine, ticket.epoch, ticket.serial
