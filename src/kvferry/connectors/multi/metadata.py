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


@dataclass(slots=True)
class MultiMetadata(KVConnectorMetadata):
    """The message of one step to every rank."""

    parts: tuple[Any, ...] = ()
    """Each child's own message; None for a disabled child."""
    loads: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Requests whose load between steps begins, with the children that load."""
    load_blocks: dict[str, frozenset[int]] = field(default_factory=dict)
    """The blocks of those of these requests for which a child loads that reports failed blocks."""
    sends: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Finished requests whose blocks are kept, with the children that asked for it."""
    sync_blocks: dict[int, frozenset[int]] = field(default_factory=dict)
    """The blocks that each child fills in this step, before the forward pass reads them."""
    disabled: dict[int, str] = field(default_factory=dict)
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
        """Add another rank's message to this one, and return it."""
        assert isinstance(other, MultiWorkerMetadata)
        for child, messages in other.parts.items():
            self.parts.setdefault(child, []).extend(messages)
        for request, children in other.failed.items():
            self.failed.setdefault(request, set()).update(children)
        self.disabled = {**other.disabled, **self.disabled}
        return self


@dataclass(frozen=True, slots=True)
class MultiHandshakeMetadata(KVConnectorHandshakeMetadata):
    """One rank's handshake data of each child that has any, by the child's index."""

    parts: Mapping[int, Any]


def split_handshakes(metadata: Mapping[Any, Any]) -> dict[int, dict[Any, Any]]:
    """The handshake data of each child by rank."""
    parts: dict[int, dict[Any, Any]] = {}
    for rank, whole in metadata.items():
        assert isinstance(whole, MultiHandshakeMetadata)
        for child, part in whole.parts.items():
            parts.setdefault(child, {})[rank] = part
    return parts
