"""Acts as a router for push between two engines of this process: one push ticket for both legs,
which may start in any order.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from tests.vllm.inside.engines import Engine, run_until

from kvferry.config import ClusterSecret
from kvferry.protocol.tickets import PushTicket, PushTicketKey

PUSH: dict[str, Any] = {"kv_connector": "NixlPushConnector"}


@dataclass
class Legs:
    """P and D, and what a router has learned about P from its first answer."""

    p: Engine
    d: Engine
    source: dict[str, Any] = field(default_factory=dict)
    _handovers: count = field(default_factory=count)  # type: ignore[type-arg]

    def __post_init__(self) -> None:
        self.learn_source()

    def learn_source(self) -> None:
        self.source = self.p.prefill("asked first", [1, 2, 3])
        assert "remote_epoch" in self.source, "only an engine that pushes reports it"
        # Release the blocks, as a router does when its client has left. vLLM has no such call.
        self.p.scheduler.connector.scheduler_side.request_abandoned("asked first")
        run_until(lambda: not self.p.remains(), self.p)

    def ticket(self) -> str:
        return push_ticket(self.source, f"handover {next(self._handovers)}")

    def ask_p(self, name: str, tokens: Sequence[int] | None, ticket: str, **more: Any) -> None:
        self.p.add(
            name,
            tokens,
            {"do_remote_decode": True, "push_ticket": ticket},
            **{"max_tokens": 1, **more},
        )

    def ask_d(self, name: str, tokens: Sequence[int] | None, ticket: str, **more: Any) -> None:
        self.d.add(name, tokens, {"do_remote_prefill": True, "push_ticket": ticket}, **more)

    def registered(self, num: int = 1) -> None:
        """Wait until D's registration has reached P."""
        run_until(lambda: self.p.transfer_worker.registrations == num, self.d)

    def computed(self, name: str) -> None:
        """Wait until P has computed the request and holds its blocks for D."""
        run_until(
            lambda: self.p.answers[name].finish is not None and self.p.transfer_worker.leases > 0,
            self.p,
        )


def push_ticket(source: Mapping[str, Any], match_id: str) -> str:
    """Sign a push ticket. `source`: the parameters in P's answer to an earlier request."""
    ticket = PushTicket(
        match_id=match_id,
        engine=source["remote_engine_id"],
        epoch=source["remote_epoch"],
        host=source["remote_host"],
        port=source["remote_port"],
        tp_size=source["tp_size"],
    )
    return PushTicketKey(ClusterSecret.load(os.environ).key).sign(ticket)
