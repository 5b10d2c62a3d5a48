"""`NixlConnector` and `NixlPushConnector`: facades that forward vLLM's connector calls to the half
of their role.

Pull: the decode side reads the blocks of a finished prefill leg. Push: the decode side registers
before the prefill leg has finished, and receives the blocks as soon as they are computed. Both have
the same scheduler half (`scheduler.py`), which owns a transfer mode (`transfer_mode.py`,
`push_mode.py`), and the same worker half (`worker.py`).
"""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

from kvferry.config import NixlExtraConfig
from kvferry.connectors.contract import (
    ConnectorConfig,
    KVCacheBlocks,
    KVCacheConfig,
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorOutput,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    KVTensor,
    Request,
    SupportsHMA,
)
from kvferry.connectors.metadata import NixlConnectorMetadata
from kvferry.connectors.push_mode import PushMode
from kvferry.connectors.scheduler import NixlConnectorScheduler
from kvferry.connectors.stats import KVConnectorStats, TransferStats
from kvferry.connectors.transfer_mode import PullMode, TicketIssuer
from kvferry.connectors.worker import NixlConnectorWorker
from kvferry.errors import LocalProtocolError
from kvferry.protocol.tickets import TicketKey

__all__ = ["NixlConnector", "NixlPushConnector"]


class NixlConnector(KVConnectorBase_V1, SupportsHMA):
    """The pull connector: the decode side reads the blocks of a finished prefill leg."""

    honours_token_range = True
    opens_side_channel = True
    transfer_mode: ClassVar[Literal["pull", "push"]] = "pull"
    """The mode that engines advertise on `/metrics`: a router starts both legs at once if both
    sides push.
    """

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
        pushes = cls.transfer_mode == "push"
        mode = PushMode(config, cache, extra, issuer) if pushes else PullMode(issuer)
        return NixlConnectorScheduler(config, cache, extra, issuer=issuer, mode=mode)

    @property
    def _scheduler(self) -> NixlConnectorScheduler:
        if self._scheduler_half is None:
            raise LocalProtocolError(
                "a worker's connector got a call for the scheduler's connector; create that one "
                "with KVConnectorRole.SCHEDULER"
            )
        return self._scheduler_half

    @property
    def _worker(self) -> NixlConnectorWorker:
        if self._worker_half is None:
            raise LocalProtocolError(
                "the scheduler's connector got a call for a worker's connector; create that one "
                "with KVConnectorRole.WORKER"
            )
        return self._worker_half

    def shutdown(self) -> None:
        (self._scheduler_half or self._worker).close()

    def set_wakeup(self, wake: Callable[[], None]) -> None:
        (self._scheduler_half or self._worker).set_wakeup(wake)

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        return (self._scheduler_half or self._worker).take_stats()

    # -- scheduler --

    def expect_request(self, request: Request) -> None:
        self._scheduler.expect_request(request)

    def on_new_request(self, request: Request) -> None:
        self._scheduler.on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self._scheduler.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        self._scheduler.update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return self._scheduler.build_connector_meta(getattr(scheduler_output, "slices", ()))

    def has_pending_block_frees(self) -> bool:
        return self._scheduler.has_pending_block_frees()

    def reclaim_blocks(self, num_blocks: int) -> None:
        self._scheduler.reclaim_blocks(num_blocks)

    def reset_cache(self) -> bool | None:
        self._scheduler.reset_cache()
        return None

    def set_weights_version(self, version: str) -> None:
        self._scheduler.set_weights_version(version)

    def is_load_optional(self, request_id: str) -> bool:
        return self._scheduler.is_load_optional(request_id)

    def has_pending_push_work(self) -> bool:
        return self._scheduler.has_pending_commands()

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self._scheduler.take_output(connector_output)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduler.request_finished(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduler.request_finished(request, block_ids)

    def request_abandoned(self, request_id: str) -> None:
        self._scheduler.request_abandoned(request_id)

    def set_xfer_handshake_metadata(
        self, metadata: Mapping[int, KVConnectorHandshakeMetadata]
    ) -> None:
        self._scheduler.serve(metadata)

    # -- worker --

    def register_kv_caches(self, kv_caches: Mapping[str, KVTensor]) -> None:
        self._worker.register_kv_caches(kv_caches)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return self._worker.handshake_metadata()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata = self._connector_metadata
        assert isinstance(metadata, NixlConnectorMetadata)
        self._worker.start_load_kv(metadata)

    def wait_for_layer_load(self, layer_name: str) -> None:
        return None

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        return None

    def wait_for_save(self) -> None:
        return None

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        return self._worker.get_transfer_results()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        results = self._worker.get_transfer_results()
        return results.finished_sending, results.finished_recving

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return self._worker.take_worker_metadata()

    # -- class methods --

    @classmethod
    def get_required_kvcache_layout(cls, config: ConnectorConfig) -> str | None:
        return "HND"

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats:
        return TransferStats(data or {})


class NixlPushConnector(NixlConnector):
    """The push connector: the decode side registers for a prefill leg before it has finished."""

    transfer_mode = "push"
