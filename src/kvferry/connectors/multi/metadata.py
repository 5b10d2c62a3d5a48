"""The messages between the two roles of a `MultiConnector`. Plain data; every message of a child
stays with the child's index.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvferry.connectors.contract import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)


@dataclass(frozen=True, slots=True)
class MultiMetadata(KVConnectorMetadata):
    """The message of one step to every rank."""

    parts: tuple[Any, ...]
    """Each child's own message; None for a child that is not called in this step."""
    loads: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Requests whose load between steps begins, with the children that load."""
    load_blocks: Mapping[str, frozenset[int]] = field(default_factory=dict)
    """The blocks of those of these requests for which a child loads that reports failed blocks."""
    sends: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Finished requests whose blocks are kept, with the children that asked for it."""
    sync_blocks: Mapping[int, frozenset[int]] = field(default_factory=dict)
    """The blocks that each child fills in this step, before the forward pass reads them."""
    disabled: Mapping[int, str] = field(default_factory=dict)
    """Children that were disabled since the last step, with the reason."""


@dataclass(slots=True)
class MultiWorkerMetadata(KVConnectorWorkerMetadata):
    """The ranks' message to the scheduler."""

    parts: dict[int, list[Any]] = field(default_factory=dict)
    """The own messages of each child, from the ranks that have one."""
    failed: dict[str, set[int]] = field(default_factory=dict)
    """Requests whose load has failed, with the children that failed."""
    disabled: dict[int, str] = field(default_factory=dict)
    """Children that failed on a rank, with the reason."""

    @property
    def is_empty(self) -> bool:
        return not (self.parts or self.failed or self.disabled)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "MultiWorkerMetadata":
        assert isinstance(other, MultiWorkerMetadata)
        parts = {
            child: [*self.parts.get(child, ()), *other.parts.get(child, ())]
            for child in self.parts.keys() | other.parts.keys()
        }
        failed = {
            request: self.failed.get(request, set()) | other.failed.get(request, set())
            for request in self.failed.keys() | other.failed.keys()
        }
        return MultiWorkerMetadata(parts, failed, {**other.disabled, **self.disabled})


@dataclass(frozen=True, slots=True)
class MultiHandshakeMetadata(KVConnectorHandshakeMetadata):
    """One rank's handshake data of each child that has any, by the child's index."""

    parts: Mapping[int, Any]
