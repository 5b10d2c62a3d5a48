"""How an instance joins a router's fleet by itself: a statement sealed with the cluster's secret,
renewed while the instance is well. Pure.

The statement says when it was made, so that one overheard is soon worth nothing; hosts' clocks may
differ by minutes.
"""

from dataclasses import dataclass

import msgspec

from kvferry.errors import InvalidTicket
from kvferry.protocol.tickets import Seal
from kvferry.router.fleet.instances import Role

__all__ = ["DEFAULT_TTL_S", "MAX_CLOCK_SKEW_S", "Registrar", "Statement"]

MAX_CLOCK_SKEW_S = 300.0
DEFAULT_TTL_S = 15.0
_MAX_TTL_S = 3600.0


class Statement(msgspec.Struct, frozen=True):
    role: Role
    url: str
    ttl_s: float
    """Gone from the fleet unless it is renewed by then."""
    made_at: float
    """Seconds since 1970 by the instance's clock."""
    is_leaving: bool = False


@dataclass(slots=True)
class Registrar:
    secret: bytes

    @property
    def _seal(self) -> Seal:
        return Seal(self.secret, b"kvferry registration v1")

    def sign(self, statement: Statement) -> str:
        return self._seal.close(msgspec.msgpack.encode(statement))

    def open(self, text: object, now: float) -> Statement:
        """`now`: seconds since 1970. InvalidTicket unless it is a genuine and recent statement."""
        try:
            statement = msgspec.msgpack.decode(self._seal.open(text), type=Statement)
        except msgspec.DecodeError:
            raise InvalidTicket("the statement cannot be read") from None
        except InvalidTicket:
            raise InvalidTicket("the statement was not sealed with this cluster's secret") from None
        if not 0 < statement.ttl_s <= _MAX_TTL_S:
            raise InvalidTicket(
                f"the statement's ttl_s is {statement.ttl_s}, not from 0 to {_MAX_TTL_S:g}"
            )
        if abs(now - statement.made_at) > MAX_CLOCK_SKEW_S:
            raise InvalidTicket(
                f"the statement was made {now - statement.made_at:.0f} s ago; set the clocks of "
                "both hosts"
            )
        return statement
