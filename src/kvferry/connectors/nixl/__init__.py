"""`NixlConnector` and the connectors that differ from it in mode and transport.

Pull: the decode side reads the blocks of a finished prefill leg. Push: the decode side registers
before the prefill leg has finished, and receives the blocks as soon as they are computed. Both have
the same scheduler side (`scheduler.py`), which owns a transfer mode (`transfer_mode.py`,
`push_mode.py`), and the same worker side (`worker.py`).
"""

from dataclasses import replace
from functools import partial

from kvferry.config import KVTransferConfig, NixlExtraConfig, P2pNcclExtraConfig
from kvferry.connectors.contract import ConnectorConfig, ConnectorDescription, KVCacheConfig
from kvferry.connectors.nixl.push_mode import PushMode
from kvferry.connectors.nixl.scheduler import NixlConnectorScheduler
from kvferry.connectors.nixl.transfer_mode import PullMode, SchedulerContext
from kvferry.connectors.nixl.worker import NixlConnectorWorker
from kvferry.protocol.tickets import TicketKey


def _make_scheduler(
    config: ConnectorConfig, cache: KVCacheConfig, transfer_mode: str
) -> NixlConnectorScheduler:
    extra = config.kv_transfer.extra
    assert isinstance(extra, NixlExtraConfig)
    context = SchedulerContext(config, cache, extra, TicketKey(config.secret))
    mode = PushMode(context) if transfer_mode == "push" else PullMode(context)
    return NixlConnectorScheduler(context, mode)


def _make_worker(config: ConnectorConfig, cache: KVCacheConfig) -> NixlConnectorWorker:
    extra = config.kv_transfer.extra
    assert isinstance(extra, NixlExtraConfig)
    return NixlConnectorWorker(config, cache, extra)


NixlConnector = ConnectorDescription(
    partial(_make_scheduler, transfer_mode="pull"),
    _make_worker,
    honours_token_range=True,
    moves_states=True,
    opens_side_channel=True,
    transfer_mode="pull",
    required_layout=lambda config: "HND",
)
"""The pull connector: the decode side reads the blocks of a finished prefill leg."""

MooncakeConnector = NixlConnector
"""The pull connector with the settings of `MooncakeExtraConfig`: its transport is mooncake."""

NixlPushConnector = replace(
    NixlConnector,
    make_scheduler=partial(_make_scheduler, transfer_mode="push"),
    transfer_mode="push",
)
"""The push connector: the decode side registers for a prefill leg before it has finished."""


def _of_send_type(transfer: KVTransferConfig) -> ConnectorDescription:
    assert isinstance(transfer.extra, P2pNcclExtraConfig)
    return NixlPushConnector if transfer.extra.transfer_mode == "push" else NixlConnector


P2pNcclConnector = replace(NixlConnector, configured=_of_send_type)
"""Pulls or pushes, as `send_type` says, over process groups of `torch.distributed`."""
