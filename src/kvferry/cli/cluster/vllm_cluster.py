"""A cluster of real vLLM servers and a router: `kvferry up --vllm`. Used by one thread."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvferry.cli.cluster.local_cluster import Launch, LocalCluster
from kvferry.cli.cluster.processes import ChildProcess
from kvferry.cli.cluster.vllm_servers import VllmProcess, explain, stage
from kvferry.errors import KVFerryError
from kvferry.types import Address

if TYPE_CHECKING:
    from kvferry.cli.cluster.startup_view import StartupView

_ALL_LINES = 200
_TAIL_LINES = 40


class VllmCluster(LocalCluster):
    """Starts vLLM servers on their GPUs or cores, then a router in front of them."""

    def __init__(
        self,
        launch: Launch,
        environment: Mapping[str, str],
        group: int,
        start_timeout_s: float,
        servers: Sequence[VllmProcess],
        logs: Path,
        on_line: Callable[[str], None] | None = None,
    ) -> None:
        """`launch` makes the router's command line. Each process gets a log file in `logs`."""
        super().__init__(launch, environment, group, start_timeout_s, on_line)
        self._servers = servers
        self._logs = logs

    def _start_engines(self, names: Sequence[str], view: "StartupView") -> list[Address]:
        children: list[ChildProcess] = []
        found: list[Address] = []
        for server in self._servers:
            if server.waits_for_previous:
                found += self._wait_ready(children, view)
                children = []
            child = ChildProcess(
                server.name,
                server.command,
                {**self._environment, **server.environment},
                on_line=self._on_line,
                address=server.address,
                log_file=self._logs / f"{server.name}.log",
            )
            children.append(self._begin(child, view))
        return found + self._wait_ready(children, view)

    def last_log_lines(self) -> list[tuple[str, list[str]]]:
        ended = [child for child in self._children if child.has_failed]
        return [
            (
                f"{child.name}, all in {child.log_file}" if child.log_file else child.name,
                child.tail(_TAIL_LINES),
            )
            for child in ended or self._children
        ]

    def _wait_ready(self, children: list[ChildProcess], view: "StartupView") -> list[Address]:
        try:
            return self._wait_healthy(children, view)
        except KVFerryError as error:
            failed = next((child for child in children if child.has_failed), None)
            hints = explain(failed.tail(_ALL_LINES)) if failed is not None else []
            hints.append(f"the logs are in {self._logs}")
            raise KVFerryError("; ".join([str(error), *hints])) from error

    def _show_stage(self, child: ChildProcess, view: "StartupView") -> None:
        if child.name == "router":
            super()._show_stage(child, view)
        else:
            view.report(child.name, stage(child.tail(_ALL_LINES)))
