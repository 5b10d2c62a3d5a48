"""What both sides of HTTP are made of: header fields, and a request as a handler gets it. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

__all__ = ["Headers", "ServerRequest"]

_NO_VALUES: Mapping[str, str] = MappingProxyType({})


class Headers:
    """Header fields of a request or an answer. Names are compared without case; fields of one name are joined by a comma."""

    __slots__ = ("_lines", "_pairs", "_values")

    def __init__(self, lines: Sequence[str] = (), values: Mapping[str, str] = _NO_VALUES) -> None:
        """The lines of a head, found to be valid, and what they say by name. Only who asks for `items` has the lines taken apart."""
        self._lines = lines
        self._values = values
        self._pairs: list[tuple[str, str]] | None = None

    def get(self, name: str) -> str | None:
        """`name` in lower case."""
        return self._values.get(name)

    def items(self) -> Iterable[tuple[str, str]]:
        """In the order and spelling in which they came."""
        if self._pairs is None:
            parts = [line.partition(":") for line in self._lines]
            self._pairs = [(name, value.strip(" \t")) for name, _, value in parts]
        return self._pairs

    def __len__(self) -> int:
        return len(self._lines)

    def __repr__(self) -> str:
        return f"Headers({self.items()!r})"


@dataclass(slots=True)
class ServerRequest:
    """`path` and `query` are as they were sent, escapes and all. While `admit` looks at it, `body` is empty."""

    method: str
    path: str
    query: str
    headers: Headers
    body: bytes
    peer: str
