"""The connector's part in exchanging KV with vLLM's own NixlConnector, which is called stock here.

Used only if `interop` is set. A composition root puts a `StockInterop` into the connector's
configuration; without it no stock message is sent or understood. See docs/interop.md.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from kvferry.config import NixlExtraConfig
from kvferry.config.side_channel import numeric_host
from kvferry.connectors.contract import ConnectorConfig, Request
from kvferry.connectors.params import LoadFromPeer
from kvferry.connectors.scheduler_tables import LoadOffer
from kvferry.connectors.transfer_mode import LoadDecision, LoadPlan, LoadRefusal, PullMode
from kvferry.errors import ConfigError, LocalProtocolError, RemoteProtocolError
from kvferry.protocol.stock_dialect import (
    StockIdentity,
    describe_rank,
    encode_payload,
    read_source,
)
from kvferry.types import Address, EngineId, Region, RequestId
from kvferry.worker.commands import PrepareStockLoad
from kvferry.worker.stock import NotifyingTransport, StockDialect, StockQuestions, StockSettings
from kvferry.worker.stock_side_channel import StockListening


class StockTransport(NotifyingTransport, Protocol):
    """A NIXL transport that is not registered yet."""

    def register(self, regions: Sequence[Region]) -> bool: ...
    def identity(self) -> tuple[str, bytes]: ...


class StockKit(Protocol):
    """Makes the transports that speak with stock peers. The caller closes each of them."""

    def listener(self) -> StockListening: ...
    def dialer(self) -> StockQuestions: ...
    def transport(self) -> StockTransport: ...


def _just_now(request: Request) -> float:
    return time.monotonic()


@dataclass(frozen=True, slots=True)
class StockInterop:
    """How this engine exchanges KV with stock peers."""

    kit: StockKit
    identity: StockIdentity | None = None
    """WORKER only."""
    arrived_at: Callable[[Request], float] = _just_now
    """When a request arrived at the engine's server, by the monotonic clock. The prefill side's
    lease runs from then on, also while the command is on its way to the transfer worker.
    """


def check_interop(config: ConnectorConfig, extra: NixlExtraConfig, connector: str) -> None:
    """Raise ConfigError if `interop` is set where it cannot work."""
    if not extra.interop:
        return
    if config.stock is None:
        raise ConfigError("interop is set, but only engines inside vLLM can speak with stock vLLM")
    if connector != "NixlConnector":
        raise ConfigError(f"interop works with NixlConnector only, not with {connector}")
    if config.parallel.tp_size != 1:
        raise ConfigError(
            f"interop supports tensor parallelism 1, and this engine has {config.parallel.tp_size}"
        )


# -- scheduler --


@dataclass(frozen=True, slots=True)
class StockPullMode(PullMode):
    """Pull, and decode legs whose prefill side is a stock vLLM: these have no ticket."""

    peer_addresses: frozenset[str]
    arrived_at: Callable[[Request], float]

    def plan_load(self, request: Request, role: LoadFromPeer) -> LoadDecision:
        if role.ticket is not None or role.push_ticket is not None:
            # Not `super()`, which a dataclass with slots breaks.
            return PullMode.plan_load(self, request, role)
        try:
            source = read_source(request.kv_transfer_params or {}, self.issuer.cache.block_size)
        except RemoteProtocolError as error:
            return LoadRefusal(str(error))
        address = Address(numeric_host(source.address.host), source.address.port)
        if str(address) not in self.peer_addresses:
            return LoadRefusal(
                f"the request has no ticket, and {address} is not among the `peers` that this "
                "engine may load from without one"
            )
        if self.issuer.weights:
            return LoadRefusal(
                "this engine's weights were replaced since its start, and a stock prefill side "
                "cannot say which weights it has"
            )
        request_id = RequestId(request.request_id)
        # The tokens themselves are not in the parameters: the router is trusted to send the same
        # prompt to both legs.
        num_tokens = min(source.num_tokens, request.num_prompt_tokens)
        source = replace(source, address=address)
        return LoadPlan(
            (PrepareStockLoad(request_id, source, self.arrived_at(request)),),
            LoadOffer(num_tokens, (source.engine, "stock", source.request)),
        )


# -- worker --


@dataclass(frozen=True, slots=True)
class StockPart:
    """A rank's dialect, and its answer to a stock handshake."""

    dialect: StockDialect
    payload: bytes


def make_stock_part(
    config: ConnectorConfig,
    extra: NixlExtraConfig,
    regions: tuple[Region, ...],
    uses_host_buffer: bool,
) -> StockPart | None:
    """Register the cache for stock peers; None without `interop`."""
    if config.stock is None:
        return None
    identity = config.stock.identity
    if identity is None:
        raise LocalProtocolError("a worker with interop does not know what stock peers compare")
    if uses_host_buffer or any(region.layers for region in regions):
        raise ConfigError(
            "interop reads the cache itself, layer by layer; remove kv_buffer_device, "
            "force_host_buffer and enable_cross_layers_blocks"
        )
    transport = config.stock.kit.transport()
    if not transport.register(regions):
        raise ConfigError("interop needs NIXL, which cannot register the memory of this KV cache")
    settings = StockSettings(
        identity=identity,
        regions=regions,
        lease_s=extra.kv_lease_duration,
        handshake_timeout_s=extra.handshake_timeout,
        read_timeout_s=extra.read_timeout,
        queue_timeout_s=extra.queue_timeout,
        step_timeout_s=extra.step_timeout,
    )
    _, agent_metadata = transport.identity()
    engine = EngineId(config.kv_transfer.engine_id)
    metadata = describe_rank(engine, agent_metadata, identity, regions)
    return StockPart(
        StockDialect(settings, transport, config.stock.kit.dialer(), time.monotonic),
        encode_payload(identity, metadata),
    )
