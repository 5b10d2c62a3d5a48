"""What the parts of the connector's scheduler side share, and how they pull.

`SchedulerContext` has the settings, builds the tickets and collects the commands for the transfer
workers. `PullMode` is the part of the scheduler that differs between pull and push; `PushMode`
(`push_mode.py`) overrides what push does in another way.

Runs on the engine's main thread, without I/O.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvferry.config import NixlExtraConfig
from kvferry.connectors.contract import ConnectorConfig, KVCacheConfig, Request, ScheduledSlice
from kvferry.connectors.nixl.params import LoadFromPeer, PrefillForPeer
from kvferry.connectors.stats import TransferStats
from kvferry.errors import InvalidTicket
from kvferry.protocol.fingerprints import Fingerprint
from kvferry.protocol.tickets import NO_BLOCK, Ticket, TicketKey, runs_from_blocks
from kvferry.types import Address, BlockIds, Epoch, RequestId
from kvferry.worker.commands import GrantLease, PrepareLoad, SkipLoad, WorkerCommand
from kvferry.worker.side_channel import SideChannel

SharedTicketKey = tuple[str, str, int | str]
"""Engine, epoch and serial of one lease of one engine incarnation. For a push ticket, whose lease
does not exist yet, the match id stands in the place of the serial.
"""


@dataclass(frozen=True, slots=True)
class LoadOffer:
    """What a waiting request may load: the first `num_tokens` tokens of its prompt, or nothing
    because of `refusal`.
    """

    num_tokens: int
    ticket: SharedTicketKey | None = None
    refusal: str | None = None
    min_tokens: int = 1
    """Load nothing if fewer than this many tokens would be loaded."""
    is_optional: bool = False
    """The load only saves computation: if the load fails for any reason, the engine computes the
    request.
    """
    unchecked_ticket: str = ""
    """The ticket of a retained turn that the retaining engine has not confirmed yet. The scheduler
    asks only when the engine tries to schedule the request.
    """
    num_pending_ranks: int = 0
    """How many ranks still wait for the retaining engine's answer."""
    num_local_tokens: int | None = None
    """How many tokens of the request the engine already had when it last asked for the offer; None
    before it has asked.
    """
    leg_id: str = ""
    """The id under which the router may ask why the load failed; empty if there is none."""


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """Send `commands` to the transfer workers and make `offer` to the engine. Without an offer the
    engine computes the request.
    """

    commands: tuple[WorkerCommand, ...] = ()
    offer: LoadOffer | None = None


@dataclass(slots=True)
class SchedulerContext:
    """What the parts of the scheduler side share."""

    config: ConnectorConfig
    cache: KVCacheConfig
    extra: NixlExtraConfig
    key: TicketKey
    commands: list[WorkerCommand] = field(default_factory=list, init=False)
    stats: TransferStats = field(default_factory=TransferStats, init=False)
    side_channel: SideChannel | None = field(default=None, init=False)
    epoch: Epoch | None = field(default=None, init=False)
    """None until the side channel is open; another one after each sleep."""
    address: Address | None = field(default=None, init=False)
    """The address of this engine's side channel; None until the side channel is open."""
    uses_host_buffer: bool = field(default=False, init=False)
    """Readers read a copy in a host buffer, so a lease must name the blocks to copy. Known when the
    side channel opens.
    """
    serial: int = field(default=0, init=False)
    """The serial of the last ticket."""
    weights: str = field(default="", init=False)
    """The version of this engine's weights; empty for the weights of its start."""

    @property
    def engine_id(self) -> str:
        return self.config.kv_transfer.engine_id

    @property
    def is_producer(self) -> bool:
        return self.config.kv_transfer.is_kv_producer

    @property
    def is_consumer(self) -> bool:
        return self.config.kv_transfer.is_kv_consumer

    def send(self, *commands: WorkerCommand) -> None:
        """Send commands to the transfer workers with the next step."""
        self.commands += commands

    def is_ticket_of_peer(self, text: object) -> bool:
        try:
            return self.key.open(text).engine != self.engine_id
        except InvalidTicket:
            return False

    def return_ticket(self, request: RequestId, text: object) -> None:
        """Let the peer that issued a ticket free its blocks now: the ticket is not used."""
        self.send(PrepareLoad(request, str(text)), SkipLoad(request))

    def next_serial(self) -> int:
        self.serial += 1
        return self.serial

    def blocks_to_copy(self, blocks: BlockIds) -> tuple[tuple[int, ...], ...]:
        """The leased blocks that the transfer workers copy into the host buffer; none without a
        host buffer.
        """
        return tuple(map(tuple, blocks)) if self.uses_host_buffer else ()

    def ticket(
        self, request: Request, serial: int, blocks: BlockIds, tokens: Fingerprint
    ) -> Ticket:
        assert self.address is not None
        assert self.epoch is not None
        return Ticket(
            engine=self.engine_id,
            epoch=self.epoch,
            request=request.request_id,
            serial=serial,
            host=self.address.host,
            port=self.address.port,
            tp_size=self.config.parallel.tp_size,
            block_size=self.cache.block_size,
            block_runs=[runs_from_blocks(group) for group in blocks],
            tokens=tokens,
            lease_ttl_s=self.extra.kv_lease_duration,
            weights=self.weights,
        )


class PullMode:
    """The decode side reads the blocks of a finished prefill leg, so a prefill leg that has not
    finished needs nothing.
    """

    def __init__(self, context: SchedulerContext) -> None:
        self._context = context

    def plan_load(self, request: Request, role: LoadFromPeer) -> LoadPlan | None:
        """Decide how a new decode leg gets its KV; None: with the ticket that it carries.
        `InvalidTicket` if the request's parameters cannot be used.
        """
        if role.ticket is None and role.push_ticket is not None:
            raise InvalidTicket(
                "the router sent a push ticket, but this engine uses NixlConnector, which pulls; "
                "use NixlPushConnector on this engine, or a router that calls the prefill side "
                "first"
            )
        return None

    def announce_prefill_leg(self, request: Request, role: PrefillForPeer) -> None:
        """Announce a prefill leg to the transfer workers; may be repeated."""

    def add_prefill_leg(self, request: Request, role: PrefillForPeer) -> None:
        """Note and announce a new prefill leg."""

    def needs_slices(self, request: RequestId) -> bool:
        """Whether `plan_step` has a use for slices of the request."""
        return False

    def plan_step(self, slices: Iterable[ScheduledSlice]) -> None:
        """Command what follows from the slices that the engine has scheduled for this step."""

    def grant_lease(self, request: RequestId, blocks: BlockIds) -> int:
        """Lease the blocks of a finished prefill leg, and return the serial of the lease."""
        serial = self._context.next_serial()
        copied = self._context.blocks_to_copy(blocks)
        self._context.send(GrantLease(request, serial, copied))
        return serial

    def ticket_params(self, ticket: Ticket) -> dict[str, Any]:
        """The `kv_transfer_params` that carry a ticket: the keys of vLLM's connector for routers
        that read them, and the signed ticket, which is the only key kvferry reads.
        """
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [
                [block for block in group if block != NO_BLOCK] for group in ticket.block_ids()
            ],
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
            "ticket": self._context.key.sign(ticket),
        }

    def finish_prefill_leg(
        self, request: Request, role: PrefillForPeer, params: Mapping[str, Any] | None
    ) -> None:
        """Tell waiting decode sides about the end of a prefill leg. `params` carry the leg's
        ticket; None if the engine holds no blocks for a peer.
        """

    def end_lease(self, request: RequestId) -> None:
        """Note that the lease of a prefill leg has ended on every rank."""

    def drop_prefill_legs(self, reason: str) -> None:
        """Stop the transfer of all unfinished prefill legs."""
