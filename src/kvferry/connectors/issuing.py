"""What a producer's scheduler puts into tickets, and into the parameters that carry them. Plain data; no I/O."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvferry.connectors.contract import ConnectorConfig, KVCacheConfig, Request
from kvferry.protocol.fingerprints import Fingerprint
from kvferry.protocol.tickets import HOLE, Ticket, TicketKey, runs_from_blocks
from kvferry.types import Address

__all__ = ["TicketIssuer"]


@dataclass(slots=True)
class TicketIssuer:
    config: ConnectorConfig
    cache: KVCacheConfig
    key: TicketKey
    ttl_s: float
    """Of a lease for a peer that was sent for it."""
    address: Address | None = None
    """Of our side channel, once it is open."""
    serial: int = 0

    def next_serial(self) -> int:
        self.serial += 1
        return self.serial

    def ticket(self, request: Request, serial: int, blocks: Sequence[Sequence[int]], tokens: Fingerprint) -> Ticket:
        assert self.address is not None
        return Ticket(
            engine=self.config.kv_transfer.engine_id,
            epoch=self.config.epoch,
            request=request.request_id,
            serial=serial,
            host=self.address.host,
            port=self.address.port,
            tp_size=self.config.parallel.tp_size,
            block_size=self.cache.block_size,
            block_runs=[runs_from_blocks(group) for group in blocks],
            tokens=tokens,
            ttl_s=self.ttl_s,
        )

    def params(self, ticket: Ticket) -> dict[str, Any]:
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
            "ticket": self.key.sign(ticket),
        }
