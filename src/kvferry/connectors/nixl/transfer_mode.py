"""The part of the connector's scheduler that differs between pull and push, and pull's version.

`NixlConnectorScheduler` owns one `TransferMode` and asks it at the points where pull and push
differ. A mode decides and returns commands or a `LoadDecision`; the scheduler carries them out, so
a mode never touches the scheduler's state. `PullMode` is here, `PushMode` in `push_mode.py`. Both
build their tickets with the scheduler's `TicketIssuer`.

Runs on the engine's main thread, without I/O.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvferry.connectors.contract import ConnectorConfig, KVCacheConfig, Request, ScheduledSlice
from kvferry.connectors.nixl.params import LoadFromPeer, PrefillForPeer
from kvferry.connectors.nixl.tables import LoadOffer
from kvferry.protocol.fingerprints import Fingerprint
from kvferry.protocol.tickets import NO_BLOCK, Ticket, TicketKey, runs_from_blocks
from kvferry.types import Address, Epoch, RequestId
from kvferry.worker.commands import GrantLease, WorkerCommand

# -- contract --


@dataclass(frozen=True, slots=True)
class LoadByTicket:
    """Load the KV of a finished prefill leg, whose ticket the request carries. The scheduler opens
    and checks the ticket.
    """

    ticket: object


@dataclass(frozen=True, slots=True)
class LoadRefusal:
    """Load nothing, because the request's parameters cannot be used."""

    reason: str


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """Send `commands` to the transfer workers and make `offer` to the engine. Without an offer the
    engine computes the request.
    """

    commands: tuple[WorkerCommand, ...] = ()
    offer: LoadOffer | None = None


LoadDecision = LoadByTicket | LoadRefusal | LoadPlan


@dataclass(frozen=True, slots=True)
class LeaseGrant:
    """The serial of a lease, and the commands by which the transfer workers start it."""

    serial: int
    commands: tuple[WorkerCommand, ...]


class TransferMode(Protocol):
    """What the scheduler asks where pull and push differ."""

    def plan_load(self, request: Request, role: LoadFromPeer) -> LoadDecision:
        """Decide how a new decode leg gets its KV."""

    def announce_prefill_leg(self, request: Request, role: PrefillForPeer) -> list[WorkerCommand]:
        """Return the commands that announce a prefill leg; they may be repeated."""

    def add_prefill_leg(self, request: Request, role: PrefillForPeer) -> list[WorkerCommand]:
        """Note a new prefill leg, and return the commands that announce it."""

    def needs_slices(self, request: RequestId) -> bool:
        """Whether `step_commands` has a use for slices of the request."""

    def step_commands(self, slices: Iterable[ScheduledSlice]) -> list[WorkerCommand]:
        """Return the commands that follow from what the engine has scheduled for this step."""

    def grant_lease(self, request: RequestId, blocks: Sequence[Sequence[int]]) -> LeaseGrant:
        """Lease the blocks of a finished prefill leg."""

    def ticket_params(self, ticket: Ticket) -> dict[str, Any]:
        """Return the `kv_transfer_params` that carry a ticket to the router."""

    def finish_prefill_leg(
        self, request: Request, role: PrefillForPeer, params: Mapping[str, Any] | None
    ) -> list[WorkerCommand]:
        """Return the commands that tell waiting decode sides about the end of a prefill leg.
        `params` carry the leg's ticket; None if the engine holds no blocks for a peer.
        """

    def end_lease(self, request: RequestId) -> None:
        """Note that the lease of a prefill leg has ended on every rank."""

    def drop_prefill_legs(self, reason: str) -> list[WorkerCommand]:
        """Stop the transfer of all unfinished prefill legs."""


# -- ticket issuer --


@dataclass(slots=True)
class TicketIssuer:
    """Builds the tickets of one engine and counts their serials."""

    config: ConnectorConfig
    cache: KVCacheConfig
    key: TicketKey
    lease_ttl_s: float
    """The duration of a lease that is granted to a peer at the end of a prefill leg."""
    epoch: Epoch | None = None
    """None until the side channel is open; another one after each sleep."""
    address: Address | None = None
    """The address of this engine's side channel; None until the side channel is open."""
    uses_host_buffer: bool = False
    """Readers read a copy in a host buffer, so a lease must name the blocks to copy. Known when the
    side channel opens.
    """
    serial: int = 0
    weights: str = ""
    """The version of this engine's weights; empty for the weights of its start."""

    def next_serial(self) -> int:
        self.serial += 1
        return self.serial

    def grant_lease(self, request: RequestId, blocks: Sequence[Sequence[int]]) -> LeaseGrant:
        """Lease the blocks under a new serial."""
        serial = self.next_serial()
        return LeaseGrant(serial, (GrantLease(request, serial, self.blocks_to_copy(blocks)),))

    def blocks_to_copy(self, blocks: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
        """The leased blocks that the transfer workers copy into the host buffer; none without a
        host buffer.
        """
        return tuple(map(tuple, blocks)) if self.uses_host_buffer else ()

    def ticket(
        self, request: Request, serial: int, blocks: Sequence[Sequence[int]], tokens: Fingerprint
    ) -> Ticket:
        assert self.address is not None
        assert self.epoch is not None
        return Ticket(
            engine=self.config.kv_transfer.engine_id,
            epoch=self.epoch,
            request=request.request_id,
            serial=serial,
            host=self.address.host,
            port=self.address.port,
            tp_size=self.config.parallel.tp_size,
            block_size=self.cache.block_size,
            block_runs=[runs_from_blocks(group) for group in blocks],
            tokens=tokens,
            lease_ttl_s=self.lease_ttl_s,
            weights=self.weights,
        )

    def ticket_params(self, ticket: Ticket) -> dict[str, Any]:
        """The parameters that carry a ticket: the keys of vLLM's connector for routers that read
        them, and the signed ticket, which is the only key kvferry reads.
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
            "ticket": self.key.sign(ticket),
        }


# -- pull --


@dataclass(frozen=True, slots=True)
class PullMode:
    """The decode side reads the blocks of a finished prefill leg, so a prefill leg that has not
    finished needs nothing.
    """

    issuer: TicketIssuer

    def plan_load(self, request: Request, role: LoadFromPeer) -> LoadDecision:
        if role.ticket is None and role.push_ticket is not None:
            return LoadRefusal(
                "the router sent a push ticket, but this engine uses NixlConnector, which pulls; "
                "use NixlPushConnector on this engine, or a router that calls the prefill side "
                "first"
            )
        return LoadByTicket(role.ticket)

    def announce_prefill_leg(self, request: Request, role: PrefillForPeer) -> list[WorkerCommand]:
        return []

    def add_prefill_leg(self, request: Request, role: PrefillForPeer) -> list[WorkerCommand]:
        return []

    def needs_slices(self, request: RequestId) -> bool:
        return False

    def step_commands(self, slices: Iterable[ScheduledSlice]) -> list[WorkerCommand]:
        return []

    def grant_lease(self, request: RequestId, blocks: Sequence[Sequence[int]]) -> LeaseGrant:
        return self.issuer.grant_lease(request, blocks)

    def ticket_params(self, ticket: Ticket) -> dict[str, Any]:
        return self.issuer.ticket_params(ticket)

    def finish_prefill_leg(
        self, request: Request, role: PrefillForPeer, params: Mapping[str, Any] | None
    ) -> list[WorkerCommand]:
        return []

    def end_lease(self, request: RequestId) -> None:
        return None

    def drop_prefill_legs(self, reason: str) -> list[WorkerCommand]:
        return []
