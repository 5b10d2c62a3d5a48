"""`NixlPushConnector`: the decode side registers for a prefill that is yet to come, and has its blocks as soon as they are there.

A facade like the pull connector's; what differs is decided in the process that schedules.
"""

from typing import Any

from kvferry.connectors.contract import KVConnectorMetadata
from kvferry.connectors.pull import NixlConnector
from kvferry.connectors.push_scheduler import NixlPushConnectorScheduler

__all__ = ["NixlPushConnector"]


class NixlPushConnector(NixlConnector):
    transfer_mode = "push"
    scheduler_class = NixlPushConnectorScheduler

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        scheduler = self._scheduler
        assert isinstance(scheduler, NixlPushConnectorScheduler)
        return scheduler.build_connector_meta(getattr(scheduler_output, "slices", ()))
