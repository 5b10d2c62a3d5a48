"""`kvferry register` keeps an engine registered with routers while the engine is healthy.

The engine may be any server, for example vLLM. One thread sends all requests; every request has a
timeout.
"""

import argparse
import json
import logging
import os
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from http.client import HTTPException
from types import FrameType
from urllib.parse import urlsplit

from kvferry.cli.arguments import NumberOf, Parser
from kvferry.cli.runtime import add_log_arguments, log_settings
from kvferry.config import ClusterSecret, KVRole, KVTransferConfig
from kvferry.errors import ConfigError
from kvferry.logs import configure_logs, repeats_of
from kvferry.router.fleet.instances import Instance, Role, parse_instance, shown_url
from kvferry.router.fleet.registration import (
    DEFAULT_TTL_S,
    ROUTER_ID_HEADER,
    Registrar,
    RegistrationTtl,
    Statement,
)

_log = logging.getLogger(__name__)

# The timeout of one HTTP request.
_CALL_S = 5.0
_RENEWALS = 3
"""The number of renewals within one TTL; a registration survives the loss of all but one."""
# Ignores proxy settings from the environment.
_open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open


def check_router_url(url: str) -> str:
    """Check that the URL has the form `http://HOST:PORT` without a path; raise ConfigError if
    not.
    """
    try:
        parts = urlsplit(url)
        is_good = (
            parts.scheme in ("http", "https")
            and bool(parts.hostname)
            and parts.port != 0
            and parts.path in ("", "/")
            and "@" not in parts.netloc
            and url.isprintable()
            and " " not in url
        )
    except ValueError:
        is_good = False
    if not is_good:
        raise ConfigError(f"{shown_url(url)} is not the address of a router; give http://HOST:PORT")
    return url.rstrip("/")


def role_of(transfer: KVTransferConfig) -> Role:
    """The role in which an engine with this `kv_role` joins a fleet."""
    return Role.PREFILL if transfer.kv_role is KVRole.PRODUCER else Role.DECODE


@dataclass(slots=True)
class Registration:
    """Registers one instance with routers until `stop`, then deregisters the instance.

    `run` blocks, in the main thread or in its own thread; any thread may call `stop`.
    """

    instance: Instance
    routers: Sequence[str]
    registrar: Registrar
    ttl_s: float
    _stop: threading.Event = field(default_factory=threading.Event)
    _joined: set[str] = field(default_factory=set)
    _router_ids: dict[str, str] = field(default_factory=dict)
    """The present incarnation of each router, as the router reported it."""

    def run(self) -> None:
        while not self._stop.is_set():
            if self._is_healthy():
                for router in self.routers:
                    self._send(router)
            self._stop.wait(self.ttl_s / _RENEWALS)
        # A router whose answer was lost may have accepted the statement. It has given its id.
        for router in self._router_ids:
            self._send(router, is_leaving=True)

    def stop(self) -> None:
        self._stop.set()

    def _is_healthy(self) -> bool:
        """Return whether the instance is healthy; the registration of an unhealthy instance
        expires.
        """
        try:
            with _open(f"{self.instance.url}/health", timeout=_CALL_S) as answer:
                return bool(answer.status == 200)
        except (OSError, ValueError, HTTPException) as error:
            _log.warning("not registered: instance %s is not healthy (%s)", self.instance, error)
            return False

    def _send(self, router: str, is_leaving: bool = False) -> None:
        try:
            try:
                self._post_statement(router, is_leaving)
            except urllib.error.HTTPError as error:
                # The first statement to a router, also after a restart, does not know the
                # router's id; the refusal contains it.
                router_id = error.headers.get(ROUTER_ID_HEADER)
                if router_id is None:
                    raise
                self._router_ids[router] = router_id
                self._post_statement(router, is_leaving)
        except (OSError, ValueError, HTTPException) as error:
            self._joined.discard(router)
            _log.warning(
                "not registered router=%s: %s",
                router,
                _error_text(error),
                extra=repeats_of(router),
            )
            return
        if router not in self._joined and not is_leaving:
            self._joined.add(router)
            _log.info("registered router=%s as %s", router, self.instance)

    def _post_statement(self, router: str, is_leaving: bool) -> None:
        statement = Statement(
            role=self.instance.role,
            url=self.instance.url,
            ttl_s=self.ttl_s,
            made_at=time.time(),
            is_leaving=is_leaving,
            router_id=self._router_ids.get(router, ""),
        )
        body = json.dumps({"statement": self.registrar.sign(statement)}).encode()
        request = urllib.request.Request(
            f"{router}/admin/register", body, {"Content-Type": "application/json"}
        )
        with _open(request, timeout=_CALL_S) as answer:
            answer.read()


def _error_text(error: Exception) -> str:
    """Return the router's error message if the router answered, else the exception's text."""
    if not isinstance(error, urllib.error.HTTPError):
        return str(error)
    try:
        return f"{error.code}: {json.loads(error.read(4096))['error']['message']}"
    except (OSError, ValueError, LookupError, TypeError, HTTPException):
        return str(error)


# -- command --
# `kvferry register` for an engine that was started by another program.


DESCRIPTION = (
    "Keep an instance registered with routers while it is healthy; stopping this command removes "
    "it."
)
EXAMPLES = """\
  kvferry register --router http://router:8000 --role decode --url http://10.0.0.3:8000"""


def add_arguments(parser: Parser) -> None:
    parser.add_argument(
        "--router", nargs="+", required=True, metavar="URL", help="addresses of the routers"
    )
    parser.add_argument(
        "--role",
        choices=[role.value for role in Role],
        required=True,
        help="role of the instance",
    )
    parser.add_argument(
        "--url", required=True, help="address at which routers reach the instance: http://HOST:PORT"
    )
    parser.add_argument(
        "--ttl",
        type=NumberOf(RegistrationTtl),
        default=DEFAULT_TTL_S,
        metavar="SECONDS",
        help="the routers drop the instance when it has been unhealthy for this long (default: "
        "%(default)s)",
    )
    add_log_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    configure_logs(log_settings(arguments))
    routers = [check_router_url(url) for url in arguments.router]
    registrar = Registrar(ClusterSecret.load(os.environ).key)
    registration = Registration(
        parse_instance(Role(arguments.role), arguments.url), routers, registrar, arguments.ttl
    )

    def stop(number: int, frame: FrameType | None) -> None:
        registration.stop()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    registration.run()
    return 0
