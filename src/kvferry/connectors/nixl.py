"""`NixlConnector` and the connectors that differ from it in mode and transport: their two halves,
put together.

Pull: the decode side reads the blocks of a finished prefill leg. Push: the decode side registers
before the prefill leg has finished, and receives the blocks as soon as they are computed. Both have
the same scheduler half (`scheduler.py`), which owns a transfer mode (`transfer_mode.py`,
`push_mode.py`), and the same worker half (`worker.py`).
"""

from collections.abc import Callable
from typing import Any, ClassVar, Literal

from kvferry.config import NixlExtraConfig, P2pNcclExtraConfig
from kvferry.connectors.contract import (
    ConnectorConfig,
    KVCacheConfig,
    KVConnectorMetadata,
    KVConnectorRole,
    Request,
)
from kvferry.connectors.metadata import NixlConnectorMetadata
from kvferry.connectors.push_mode import PushMode
from kvferry.connectors.scheduler import NixlConnectorScheduler
from kvferry.connectors.stats import KVConnectorStats, TransferStats
from kvferry.connectors.transfer_mode import PullMode, TicketIssuer, TransferMode
from kvferry.connectors.two_halves import TwoHalvesConnector
from kvferry.connectors.worker import NixlConnectorWorker
from kvferry.protocol.tickets import TicketKey


class NixlConnector(TwoHalvesConnector[NixlConnectorScheduler, NixlConnectorWorker]):
    """The pull connector: the decode side reads the blocks of a finished prefill leg."""

    honours_token_range = True
    moves_states = True
    opens_side_channel = True
    transfer_mode: ClassVar[Literal["pull", "push"]] = "pull"

    def __init__(
        self, config: ConnectorConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(config, role, kv_cache_config)
        extra = config.kv_transfer.extra
        assert isinstance(extra, NixlExtraConfig)
        is_scheduler = role is KVConnectorRole.SCHEDULER
        self._scheduler_half = (
            self._make_scheduler(config, kv_cache_config, extra) if is_scheduler else None
        )
        self._worker_half = (
            None if is_scheduler else NixlConnectorWorker(config, kv_cache_config, extra)
        )

    @classmethod
    def _make_scheduler(
        cls, config: ConnectorConfig, cache: KVCacheConfig, extra: NixlExtraConfig
    ) -> NixlConnectorScheduler:
        issuer = TicketIssuer(config, cache, TicketKey(config.secret), extra.kv_lease_duration)
        pushes = cls.transfer_mode_of(extra) == "push"
        mode: TransferMode = PushMode(config, cache, extra, issuer) if pushes else PullMode(issuer)
        return NixlConnectorScheduler(config, cache, extra, issuer=issuer, mode=mode)

    @classmethod
    def transfer_mode_of(cls, extra: NixlExtraConfig) -> Literal["pull", "push"]:
        """The mode with these settings, which engines advertise on `/metrics`: a router starts both
        legs at once if both sides push.
        """
        return cls.transfer_mode

    def set_wakeup(self, wake: Callable[[], None]) -> None:
        (self._scheduler_half or self._worker).set_wakeup(wake)

    # -- scheduler --

    def expect_request(self, request: Request) -> None:
        self._scheduler.expect_request(request)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return self._scheduler.build_connector_meta(getattr(scheduler_output, "slices", ()))

    def reclaim_blocks(self, num_blocks: int) -> None:
        self._scheduler.reclaim_blocks(num_blocks)

    def set_weights_version(self, version: str) -> None:
        self._scheduler.set_weights_version(version)

    def request_abandoned(self, request_id: str) -> None:
        self._scheduler.request_abandoned(request_id)

    # -- worker --

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata = self._connector_metadata
        assert isinstance(metadata, NixlConnectorMetadata)
        self._worker.start_load_kv(metadata)

    # -- class methods --

    @classmethod
    def get_required_kvcache_layout(cls, config: ConnectorConfig) -> str | None:
        return "HND"

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats:
        return TransferStats(data or {})


class MooncakeConnector(NixlConnector):
    """The pull connector with the settings of `MooncakeExtraConfig`: its transport is mooncake."""


class NixlPushConnector(NixlConnector):
    """The push connector: the decode side registers for a prefill leg before it has finished."""

    transfer_mode = "push"


class P2pNcclConnector(NixlConnector):
    """Pulls or pushes, as `send_type` says, over process groups of `torch.distributed`."""

    @classmethod
    def transfer_mode_of(cls, extra: NixlExtraConfig) -> Literal["pull", "push"]:
        assert isinstance(extra, P2pNcclExtraConfig)
        return extra.transfer_mode
