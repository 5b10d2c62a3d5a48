"""What an engine has said as a consumer since it gave us blocks that something is still copied to.

A staged engine that preempts a prefill may give its blocks to a request that is loaded, at once, while they are being copied for readers.
The bytes that are loaded come to the same place, so the load begins when the copy has ended; whatever was said after it keeps its place.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterator
from itertools import chain

from kvferry.ferry.commands import ConsumerCommand, StartLoad
from kvferry.protocol.pulls import Destination

__all__ = ["PostponedCommands"]


class PostponedCommands:
    def __init__(self, block_size: int, is_copying: Callable[[Collection[int]], bool]) -> None:
        self._block_size = block_size
        self._is_copying = is_copying
        self._commands: deque[ConsumerCommand] = deque()

    def postpones(self, command: ConsumerCommand) -> bool:
        """Whether it cannot be obeyed now; then it is kept until it can."""
        if not self._commands and not self._must_wait(command):
            return False
        self._commands.append(command)
        return True

    def take_due(self) -> Iterator[ConsumerCommand]:
        while self._commands and not self._must_wait(self._commands[0]):
            yield self._commands.popleft()

    def _must_wait(self, command: ConsumerCommand) -> bool:
        if not isinstance(command, StartLoad):
            return False
        filled = Destination(command.blocks, range(command.first_token, command.end_token)).filled_blocks(self._block_size)
        return self._is_copying(set(chain.from_iterable(filled)))
