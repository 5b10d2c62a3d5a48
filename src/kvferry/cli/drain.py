"""`kvferry drain` waits until an engine has no work left, so that it can be stopped.

For engines that do not drain by themselves on SIGTERM as the embedded engine does, for example
vLLM: as the preStop hook of a container, or as ExecStop= of a systemd unit. One thread; every
request has a timeout.
"""

import argparse
import logging
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from http.client import HTTPException

from kvferry.cli.arguments import NumberOf, Parser
from kvferry.cli.register import check_router_url
from kvferry.cli.runtime import add_log_arguments, log_settings, stop_signals
from kvferry.config.fields import Timeout
from kvferry.errors import KVFerryError
from kvferry.logs import configure_logs
from kvferry.router.fleet.instance_metrics import MAX_PAGE_BYTES, InstanceReading, read_metrics

_log = logging.getLogger(__name__)

DESCRIPTION = (
    "Wait until an engine has had no request and no block that a peer may still read for a while; "
    "then it is safe to stop it."
)
EXAMPLES = """\
  kvferry drain --url http://localhost:8000 --timeout 300"""

_CALL_S = 5.0
_INTERVAL_S = 0.5
# Ignores proxy settings from the environment.
_open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open


def add_arguments(parser: Parser) -> None:
    parser.add_argument("--url", required=True, help="address of the engine: http://HOST:PORT")
    parser.add_argument(
        "--idle",
        type=NumberOf(Timeout),
        default=10.0,
        metavar="SECONDS",
        help="the engine must have had no work for this long, so that requests that are on their "
        "way still arrive (default: %(default)s)",
    )
    parser.add_argument(
        "--timeout",
        type=NumberOf(Timeout),
        default=300.0,
        metavar="SECONDS",
        help="give up after this time and exit with code 1 (default: %(default)s)",
    )
    add_log_arguments(parser)


@dataclass(slots=True)
class IdleTime:
    """Whether an engine has been idle for long enough. Pure: the caller passes `now`."""

    idle_s: float
    _since: float | None = None

    def note(self, num_work: int, now: float) -> bool:
        """Record how much work the engine has; True once it has had none for `idle_s`."""
        if num_work:
            self._since = None
            return False
        if self._since is None:
            self._since = now
        return now - self._since >= self.idle_s


def count_work(reading: InstanceReading) -> int | None:
    """Requests of an engine and blocks that it holds for peers; None if its page shows no requests.

    Leases are not counted: an idle rank reports them late, the scheduler reports held blocks at
    once. Neither are turns that a decode side retains: without them, the next turn is computed
    again.
    """
    running, waiting = reading.load.running, reading.load.waiting
    if running is None or waiting is None:
        return None
    return int(running + waiting + (reading.kv.held_blocks or 0))


def run(arguments: argparse.Namespace) -> int:
    configure_logs(log_settings(arguments))
    url = check_router_url(arguments.url)
    with stop_signals():
        _wait_until_idle(url, IdleTime(arguments.idle), arguments.timeout)
    return 0


def _wait_until_idle(url: str, idle: IdleTime, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    shown = -1
    while True:
        try:
            work = _work_at(url)
        except ConnectionRefusedError:
            _log.info("no process listens at %s: nothing to wait for", url)
            return
        if work != shown:
            _log.info("draining %s: %d requests and blocks for peers are left", url, work)
            shown = work
        now = time.monotonic()
        if idle.note(work, now):
            return
        if now >= deadline:
            raise KVFerryError(f"after {timeout_s:g} s, {url} still has work or is not idle enough")
        time.sleep(_INTERVAL_S)


def _work_at(url: str) -> int:
    """Return the engine's work; raise ConnectionRefusedError if no process listens there."""
    try:
        with _open(f"{url}/metrics", timeout=_CALL_S) as answer:
            work = count_work(read_metrics(answer.read(MAX_PAGE_BYTES)))
    except urllib.error.HTTPError as error:
        raise KVFerryError(f"{url}/metrics answers {error.code}") from None
    except (OSError, HTTPException) as error:
        reason = getattr(error, "reason", error)
        if isinstance(reason, ConnectionRefusedError):
            raise reason from None
        # An engine that is too busy to answer has work.
        _log.warning("%s does not answer: %s", url, reason)
        return 1
    if work is None:
        raise KVFerryError(f"{url}/metrics shows no requests, so their end is unknown")
    return work
