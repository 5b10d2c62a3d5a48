"""Self-registration: an instance joins a fleet with a statement sealed with the cluster secret.

The instance renews the statement while it is healthy. A statement names the incarnation of the
router for which it was made, and a router accepts no statement twice, so an intercepted statement
is useless. The clocks of two hosts may differ by minutes. Pure.
"""

from dataclasses import dataclass, field
from typing import Annotated

import msgspec

from kvferry.config.fields import span
from kvferry.errors import InvalidTicket
from kvferry.protocol.tickets import Seal
from kvferry.router.fleet.instances import Instance, Role

MAX_CLOCK_SKEW_S = 300.0
"""Largest age of a statement, clock difference included."""
DEFAULT_TTL_S = 15.0
RegistrationTtl = Annotated[float, span("a number of seconds", 1, 3600)]
"""An instance renews several times in this time: with a shorter one it would flood the routers."""
SecondsSince1970 = Annotated[float, span("a time in seconds since 1970", 0, 1 << 40)]
ROUTER_ID_HEADER = "Kvferry-Router-Id"
"""Header with which a router names its incarnation when it refuses a statement or a loop."""


class Statement(msgspec.Struct, frozen=True):
    """An instance's declaration to the router."""

    role: Role
    """The role in which the instance joins."""
    url: str
    ttl_s: RegistrationTtl
    """Seconds until the instance is removed from the fleet unless it renews."""
    made_at: SecondsSince1970
    """Creation time in seconds since 1970, by the instance's clock."""
    is_leaving: bool = False
    """The instance is stopping and takes no new legs."""
    router_id: str = ""
    """The incarnation of the router for which the statement was made."""


@dataclass(slots=True)
class Registrar:
    """Seals and opens statements."""

    secret: bytes

    @property
    def _seal(self) -> Seal:
        return Seal(self.secret, b"kvferry registration v1")

    def sign(self, statement: Statement) -> str:
        return self._seal.close(msgspec.msgpack.encode(statement))

    def open(self, text: object, now: float) -> Statement:
        """Open a genuine and recent statement; else InvalidTicket. `now`: seconds since 1970."""
        try:
            statement = msgspec.msgpack.decode(self._seal.open(text), type=Statement)
        except msgspec.DecodeError as error:
            raise InvalidTicket(f"the statement cannot be decoded: {error}") from None
        except InvalidTicket:
            raise InvalidTicket("the statement was not signed with this cluster's secret") from None
        age_s = now - statement.made_at
        if not -MAX_CLOCK_SKEW_S <= age_s <= MAX_CLOCK_SKEW_S:
            raise InvalidTicket(
                f"the statement was made {age_s:.0f} s ago; set the clocks of both hosts"
            )
        return statement


@dataclass(slots=True)
class AcceptedStatements:
    """The newest statement of each instance that one incarnation of a router has accepted."""

    router_id: str
    _made_at: dict[Instance, float] = field(default_factory=dict, init=False)

    def accept(self, statement: Statement, instance: Instance, now: float) -> None:
        """Note a statement; InvalidTicket if it is not newer than the last one of its instance.

        An eavesdropper could otherwise bring back an instance that has left, or repeat that an
        instance leaves. `now`: seconds since 1970.
        """
        # Older statements are refused for their age, so only recent ones have to be remembered.
        for known, made_at in list(self._made_at.items()):
            if made_at < now - MAX_CLOCK_SKEW_S:
                del self._made_at[known]
        newest = self._made_at.get(instance)
        if newest is not None and not statement.made_at > newest:
            raise InvalidTicket(
                "this statement, or a newer one of the same instance, was accepted before; if the "
                "instance's clock was set back, wait until it has caught up"
            )
        self._made_at[instance] = statement.made_at
