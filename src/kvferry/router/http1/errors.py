"""How an instance can fail the router, by what the router may still do about it.

UpstreamError
  NotReached     no connection: the request was not sent
  TimedOut       connected, but silent for too long
  BrokenOff      it closed in the middle; `has_answered` says whether any byte of the answer had come
  NotHttp        what it sent is not an HTTP answer
"""

__all__ = ["BrokenOff", "NotHttp", "NotReached", "TimedOut", "UpstreamError"]


class UpstreamError(Exception):
    """An instance did not answer as it should. The message is a sentence without the instance's name."""


class NotReached(UpstreamError):
    """No connection could be made; nothing was sent."""


class TimedOut(UpstreamError):
    """It was silent for longer than it may be."""


class BrokenOff(UpstreamError):
    """It closed the connection before its answer was whole."""

    def __init__(self, message: str, has_answered: bool) -> None:  # a fact about the failure, not a switch
        self.has_answered = has_answered
        super().__init__(message)


class NotHttp(UpstreamError):
    """What it sent cannot be read as an answer."""
