"""What both sides of HTTP are made of: header fields, and a request as a handler gets it. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["Headers", "ServerRequest"]


class Headers:
    """Header fields of a request or an answer. Names are compared without case; fields of one name are joined by a comma."""

    __slots__ = ("_pairs", "_values")

    def __init__(self, pairs: Iterable[tuple[str, str]] = ()) -> None:
        self._pairs = list(pairs)
        self._values: dict[str, str] = {}
        values = self._values
        for name, value in self._pairs:
            key = name.lower()
            values[key] = f"{values[key]}, {value}" if key in values else value

    def get(self, name: str) -> str | None:
        """`name` in lower case."""
        return self._values.get(name)

    def items(self) -> Iterable[tuple[str, str]]:
        """In the order and spelling in which they came."""
        return self._pairs

    def __len__(self) -> int:
        return len(self._pairs)

    def __repr__(self) -> str:
        return f"Headers({self._pairs!r})"


@dataclass(slots=True)
class ServerRequest:
    """`path` and `query` are as they were sent, escapes and all. While `admit` looks at it, `body` is empty."""

    method: str
    path: str
    query: str
    headers: Headers
    body: bytes
    peer: str
