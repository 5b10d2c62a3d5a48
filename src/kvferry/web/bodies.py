"""The memory that the bodies of all requests of one server may take together. Pure.

The router and the engine's front-end share the rule; each reads bodies with its own HTTP stack.
"""

from typing import Protocol

from kvferry.errors import RequestRefused

FREE_BODY_BYTES = 64 * 1024
"""Bytes of a body that do not count, so that small requests are served while large ones fill the
memory.
"""


class CountedBody(Protocol):
    """The body of one request, from its arrival to the end of the request."""

    num_counted: int
    """Bytes that count towards the budget; only the budget sets it."""

    @property
    def is_arriving(self) -> bool:
        """Whether more bytes may arrive, or the whole body is not yet served."""

    def refuse(self, refusal: RequestRefused) -> None:
        """Refuse the request and count no bytes of it any more."""


class BodyBudget:
    """Counts the bytes of bodies and refuses requests whose bodies do not fit."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._bodies: set[CountedBody] = set()

    def count(self, body: CountedBody, num_bytes: int) -> None:
        """Set how many bytes of a body are held; may refuse a request, perhaps this one.

        Beyond the limit, the largest body that is arriving is refused: a client with a few huge
        uploads then cannot keep out the uploads of others. Only a body that is arriving grows, so
        there is one to refuse.
        """
        before, counted = body.num_counted, max(0, num_bytes - FREE_BODY_BYTES)
        if counted == before:
            return
        body.num_counted = counted
        self._num_bytes += counted - before
        if counted:
            self._bodies.add(body)
        else:
            self._bodies.discard(body)
        if counted > before and self._num_bytes > self._max_bytes:
            arriving = (each for each in self._bodies if each.is_arriving)
            max(arriving, key=lambda each: each.num_counted).refuse(
                RequestRefused(
                    "the server has too many large requests at once; try again later",
                    status=503,
                    retry_after_s=1,
                )
            )
