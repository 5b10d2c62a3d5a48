"""Marks each request with the routers that it has passed, so that a router notices a loop. Pure.

A router that is an instance of itself, directly, through another router or through a load balancer,
would otherwise turn one request into a thousand legs. Each router appends its id to the standard
header `Via` (RFC 9110, 7.6.3) of every request that it sends. A client may send such marks too, and
only gets its own request refused: no mark counts against the health of an instance.
"""

import re

from kvferry.errors import RequestRefused
from kvferry.router.http.messages import Headers

LOOP_DETECTED = 508
_MAX_ROUTERS = 8
_MARK = re.compile(r"(?<!\S)1\.1 kvferry-([0-9a-f]{16})(?![^,])")


def via(router_id: str, headers: Headers | None = None) -> tuple[str, str]:
    """The header of a request that this router sends. `headers`: those of the client's request; no
    other part of the client's `Via` is passed on.
    """
    passed = [] if headers is None else _routers_passed(headers)
    return "Via", ", ".join(f"1.1 kvferry-{each}" for each in [*passed, router_id])


def check_route(router_id: str, headers: Headers) -> RequestRefused | None:
    """The refusal of a request that has passed this router before, or too many routers."""
    passed = _routers_passed(headers)
    if router_id in passed:
        message = (
            "the request has passed this router before: an address in the fleet of this router, "
            "or of a router behind it, leads back here; remove that instance"
        )
    elif len(passed) >= _MAX_ROUTERS:
        message = (
            f"the request has passed {len(passed)} routers, and at most {_MAX_ROUTERS} may stand "
            "one behind the other; remove routers from the fleets of other routers"
        )
    else:
        return None
    return RequestRefused(message, status=LOOP_DETECTED)


def _routers_passed(headers: Headers) -> list[str]:
    return _MARK.findall(headers.get("via") or "")
