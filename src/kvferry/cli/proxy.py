"""`kvferry proxy`: the router in front of prefill and decode instances, with the flags of the seeds' proxies."""

import argparse
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

from kvferry.cli.addresses import dialable
from kvferry.cli.announce import announce_address
from kvferry.cli.parser import Parser
from kvferry.cli.planes import Kit
from kvferry.cli.sizes import parse_port
from kvferry.config import ClusterSecret, SideChannelConfig
from kvferry.protocol.push_tickets import PushTicketKey
from kvferry.router.app import make_app
from kvferry.router.instances import Role, pair_instances
from kvferry.router.options import RouterOptions
from kvferry.router.release import ReleaseSender
from kvferry.router.server import run_app
from kvferry.types import Address

__all__ = ["DESCRIPTION", "EXAMPLES", "add_arguments", "router_options", "run"]

DESCRIPTION = "Serve the OpenAI API by sending each prompt to a prefill instance and its KV to a decode instance."
EXAMPLES = """\
  kvferry proxy --port 8192 --prefiller-hosts localhost --prefiller-ports 8100 --decoder-hosts localhost --decoder-ports 8200
  kvferry proxy --prefiller-hosts 10.0.0.1 10.0.0.2 --prefiller-ports 8000 8000 --decoder-host 10.0.0.3 --decoder-port 8000"""


def add_arguments(parser: Parser) -> None:
    parser.add_argument("--host", default="localhost", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=parse_port, default=8000, help="port to listen on; 0: any free one (default: %(default)s)")
    for role, port in (("prefiller", 8100), ("decoder", 8200)):
        hosts = f"hosts of the {role}s, one per port or one for all (default: localhost)"
        parser.add_argument(f"--{role}-hosts", f"--{role}-host", nargs="+", metavar="HOST", default=["localhost"], help=hosts)
        ports = f"their ports, in the order of the hosts (default: {port})"
        parser.add_argument(f"--{role}-ports", f"--{role}-port", nargs="+", type=parse_port, metavar="PORT", default=[port], help=ports)


def run(arguments: argparse.Namespace) -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    options = router_options(arguments)
    secret = ClusterSecret.load(os.environ)
    with _releases(secret) as releases:
        run_app(make_app(options, releases, PushTicketKey(secret.key)), Address(options.host, options.port), _announce)
    return 0


def router_options(arguments: argparse.Namespace) -> RouterOptions:
    return RouterOptions(
        prefillers=pair_instances(Role.PREFILL, arguments.prefiller_hosts, arguments.prefiller_ports),
        decoders=pair_instances(Role.DECODE, arguments.decoder_hosts, arguments.decoder_ports),
        host=arguments.host,
        port=arguments.port,
    )


def _announce(address: Address) -> None:
    where = dialable(address)
    everywhere = "" if where == address else " and on every other address of this machine"
    print(f"kvferry proxy listens on http://{where}{everywhere}", flush=True)
    announce_address(where, os.environ)


@contextmanager
def _releases(secret: ClusterSecret) -> Iterator[ReleaseSender]:
    """The way to tell P that nobody will come. The router only dials, so it listens on the loopback alone."""
    kit = Kit.from_settings(SideChannelConfig(), secret, None, os.environ)
    sender = ReleaseSender(kit.control_plane())
    sender.start()
    try:
        yield sender
    finally:
        sender.close()
