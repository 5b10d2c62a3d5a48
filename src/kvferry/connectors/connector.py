"""`Connector`: two sides behind the class that engines drive, `KVConnectorBase_V1`.

For the embedded engine and for authors of other engines. An instance has the side of its role.
"""

from typing import Any

from kvferry.connectors.contract import (
    ConnectorConfig,
    ConnectorDescription,
    KVCacheConfig,
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    Request,
    SchedulerSide,
    SupportsHMA,
    WorkerSide,
)
from kvferry.connectors.sides import Side
from kvferry.errors import LocalProtocolError


class _Call:
    """A call that a side answers: reading it from a connector returns the side's own method."""

    def __init__(self, side: str, name: str) -> None:
        self._side = side
        self._name = name

    def __get__(self, connector: Any, owner: type) -> Any:
        return self if connector is None else getattr(getattr(connector, self._side), self._name)


class Connector(KVConnectorBase_V1, SupportsHMA):
    """The connector that a description describes, in one role. Its side answers every call that
    this class does not define (see the end of this module).
    """

    def __init__(
        self,
        description: ConnectorDescription,
        config: ConnectorConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig,
    ) -> None:
        super().__init__(config, role, kv_cache_config)
        self.description = description
        self.provides_dummy_kv = description.provides_dummy_kv
        is_scheduler = role is KVConnectorRole.SCHEDULER
        make = description.make_scheduler if is_scheduler else description.make_worker
        self._side: Any = make(config, kv_cache_config)

    def _side_for(self, role: KVConnectorRole) -> Any:
        if role is not self._role:
            raise LocalProtocolError(
                f"a connector of {self._role} got a call for the connector of {role}; create that "
                f"one with {role}"
            )
        return self._side

    @property
    def scheduler_side(self) -> SchedulerSide:
        side: SchedulerSide = self._side_for(KVConnectorRole.SCHEDULER)
        return side

    @property
    def worker_side(self) -> WorkerSide:
        side: WorkerSide = self._side_for(KVConnectorRole.WORKER)
        return side

    @property
    def needs_polling(self) -> bool:
        return self.description.needs_polling

    # -- scheduler --

    build_connector_meta: Any = _Call("scheduler_side", "build_connector_meta")
    get_num_new_matched_tokens: Any = _Call("scheduler_side", "get_num_new_matched_tokens")
    request_finished_all_groups: Any = _Call("scheduler_side", "request_finished_all_groups")
    update_state_after_alloc: Any = _Call("scheduler_side", "update_state_after_alloc")

    @property
    def requires_kv_delivery(self) -> bool:
        return super().requires_kv_delivery and self.description.requires_kv_delivery

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.scheduler_side.request_finished_all_groups(request, (block_ids,))

    # -- worker --

    save_kv_layer: Any = _Call("worker_side", "save_kv_layer")
    start_load_kv: Any = _Call("worker_side", "start_load_kv")
    wait_for_layer_load: Any = _Call("worker_side", "wait_for_layer_load")
    wait_for_save: Any = _Call("worker_side", "wait_for_save")

    def bind_connector_metadata(self, metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(metadata)
        self.worker_side.bind_connector_metadata(metadata)

    def clear_connector_metadata(self) -> None:
        super().clear_connector_metadata()
        self.worker_side.clear_connector_metadata()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        results = self.worker_side.get_transfer_results(finished_req_ids)
        return results.finished_sending, results.finished_recving


# The calls that the class defines as a `_Call` itself are abstract in its base class.
for _side, _calls in (
    ("_side", Side),
    ("scheduler_side", SchedulerSide),
    ("worker_side", WorkerSide),
):
    for _name in vars(_calls).keys() - vars(Connector).keys():
        if not _name.startswith("_"):
            setattr(Connector, _name, _Call(_side, _name))
