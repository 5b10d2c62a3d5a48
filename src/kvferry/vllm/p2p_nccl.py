"""`P2pNcclConnector` inside vLLM: the settings of vLLM's former connector, on kvferry's transport
`dist`.
"""

import os
import threading
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics

from kvferry.cli.register import Registration, check_router_url, role_of
from kvferry.config import (
    ClusterSecret,
    KVTransferConfig,
    P2pNcclExtraConfig,
    SideChannelConfig,
)
from kvferry.errors import ConfigError
from kvferry.router.fleet.instances import parse_instance
from kvferry.router.fleet.registration import DEFAULT_TTL_S, Registrar
from kvferry.types import Address
from kvferry.vllm.connector import KVFerryPushConnector
from kvferry.vllm.metrics import KVFerryPromMetrics
from kvferry.vllm.translate import transfer_config


class P2pNcclConnector(KVFerryPushConnector):
    """Pushes or pulls, as `send_type` says. A pull needs nothing of what a push reports in
    addition.
    """

    inner_name = "P2pNcclConnector"

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._registration = (
            _registration(transfer_config(vllm_config.kv_transfer_config, self.inner_name))
            if role is KVConnectorRole.SCHEDULER
            else None
        )
        if self._registration is not None:
            # A daemon thread, so that registration never delays the exit: routers notice an engine
            # that no longer renews.
            threading.Thread(
                target=self._registration.run, name="kvferry-registration", daemon=True
            ).start()

    def shutdown(self) -> None:
        if self._registration is not None:
            self._registration.stop()
        super().shutdown()

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics:
        extra = transfer_config(vllm_config.kv_transfer_config, cls.inner_name).extra
        assert isinstance(extra, P2pNcclExtraConfig)
        return KVFerryPromMetrics(
            vllm_config, metric_types, labelnames, per_engine_labelvalues, extra.transfer_mode
        )


def _registration(transfer: KVTransferConfig) -> Registration | None:
    """The registration with the router that `proxy_ip` names; None without `proxy_ip`."""
    extra = transfer.extra
    assert isinstance(extra, P2pNcclExtraConfig)
    if extra.router_url is None:
        return None
    if not extra.http_port:
        raise ConfigError(
            "kv_connector_extra_config.http_port is missing; proxy_ip needs it: the port of this "
            "vLLM server, at which the router reaches it"
        )
    host = SideChannelConfig.from_environment(os.environ).advertised_host
    instance = parse_instance(role_of(transfer), f"http://{Address(host, extra.http_port)}")
    registrar = Registrar(ClusterSecret.load(os.environ).key)
    return Registration(instance, [check_router_url(extra.router_url)], registrar, DEFAULT_TTL_S)
