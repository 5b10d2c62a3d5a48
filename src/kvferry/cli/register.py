"""`kvferry register`: keeps an engine that was started elsewhere, vLLM for one, in the fleets of routers while it is well."""

import argparse
import os
import signal
from types import FrameType

from kvferry.cli.json_logs import configure_logs
from kvferry.cli.parser import Parser
from kvferry.cli.registering import Registration, check_router_url
from kvferry.config import ClusterSecret
from kvferry.router.instances import Role, parse_instance
from kvferry.router.registration import DEFAULT_TTL_S, Registrar

__all__ = ["DESCRIPTION", "EXAMPLES", "add_arguments", "run"]

DESCRIPTION = "Keep an instance in the fleets of routers for as long as it is well; it leaves them when this is stopped."
EXAMPLES = """\
  kvferry register --router http://router:8000 --role decode --url http://10.0.0.3:8000"""


def add_arguments(parser: Parser) -> None:
    parser.add_argument("--router", nargs="+", required=True, metavar="URL", help="where the routers are")
    parser.add_argument("--role", choices=[role.value for role in Role], required=True, help="what the instance is for")
    parser.add_argument("--url", required=True, help="where routers reach it: http://HOST:PORT")
    parser.add_argument(
        "--ttl", type=float, default=DEFAULT_TTL_S, metavar="SECONDS", help="it is out when unwell for so long (default: %(default)s)"
    )


def run(arguments: argparse.Namespace) -> int:
    configure_logs(is_json=False)
    routers = [check_router_url(url) for url in arguments.router]
    registrar = Registrar(ClusterSecret.load(os.environ).key)
    registration = Registration(parse_instance(Role(arguments.role), arguments.url), routers, registrar, arguments.ttl)

    def stop(number: int, frame: FrameType | None) -> None:
        registration.stop()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    registration.run()
    return 0
