"""The order of an engine's own work, where that work goes on after the engine has asked for it (a GPU's stream).

A transfer worker that is told of blocks must not show them, nor let a peer fill them, before the device has done what the engine asked of
it until then: it writes the blocks, or still reads what was in them before. So the engine's thread marks its order when it says something,
and what it said counts from when the mark has been passed.

- `mark` is called by the engine's thread; `is_complete` by the transfer worker's, as often as it likes. Neither waits.
- A mark is passed once everything is done, and seen by other streams and processes, that the engine asked for before.
"""

from typing import Protocol

__all__ = ["EngineStream", "HostStream", "StreamEvent"]


class StreamEvent(Protocol):
    def is_complete(self) -> bool: ...


class EngineStream(Protocol):
    def mark(self) -> StreamEvent | None:
        """None: there is nothing to wait for."""


class HostStream:
    """Of an engine that computes on its own thread: what it has asked for is done."""

    def mark(self) -> StreamEvent | None:
        return None
