"""`kvferry proxy` runs the router in front of prefill and decode instances.

This module is the composition root of the router. The flags for instances are those of vLLM's toy
proxy.
"""

import argparse
import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvferry.cli.arguments import NumberOf, Parser
from kvferry.cli.cluster.addresses import announce_address, dialable
from kvferry.cli.runtime import add_log_arguments, log_settings
from kvferry.cli.tracing import add_traces_argument, find_traces_endpoint
from kvferry.config import ClusterSecret, SideChannelConfig
from kvferry.config.fields import Port
from kvferry.config.secret import (
    read_or_make_private_file,
    read_private_file,
    runtime_directory,
)
from kvferry.errors import ConfigError
from kvferry.logs import configure_logs, show
from kvferry.protocol.tickets import PushTicketKey
from kvferry.router.config_file import read_access, read_config_file
from kvferry.router.fleet.instances import Instance, Role, pair_instances
from kvferry.router.fleet.policies import POLICIES
from kvferry.router.fleet.registration import Registrar
from kvferry.router.fleet.services import ServiceName, parse_member
from kvferry.router.options import AccessOptions, RouterOptions, RoutingOptions
from kvferry.router.serving.side_channel import SideChannelSender
from kvferry.transports.registry import ConfiguredTransportKit
from kvferry.types import Address, FailurePolicy
from kvferry.web.api_keys import check_key

if TYPE_CHECKING:
    from kvferry.router.app import RouterApp
    from kvferry.router.tracing import RouterTracer

DESCRIPTION = (
    "Serve the OpenAI API: send each prompt to a prefill instance, and let a decode instance "
    "fetch its KV and generate."
)
EXAMPLES = """\
  kvferry proxy --port 8192 --prefiller-hosts localhost --prefiller-ports 8100 --decoder-hosts localhost --decoder-ports 8200
  kvferry proxy --prefiller-hosts 10.0.0.1 10.0.0.2 --prefiller-ports 8000 8000 --decoder-host 10.0.0.3 --decoder-port 8000
  kvferry proxy --config router.toml --api-key-file keys --ssl-certfile cert.pem --ssl-keyfile key.pem"""  # noqa: E501

_ADMIN_KEY_NAME = "admin-key"
_DEFAULT_PORTS = {Role.PREFILL: 8100, Role.DECODE: 8200}
_FLAGS = {Role.PREFILL: "prefiller", Role.DECODE: "decoder"}
_ACCESS_FILES = (
    "api_key_file",
    "admin_key_file",
    "instance_key_file",
    "instance_ca_file",
    "ssl_certfile",
    "ssl_keyfile",
)


def add_arguments(parser: Parser) -> None:
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="TOML file with settings (docs/router.md lists them); flags override it",
    )
    parser.add_argument("--host", help="address to listen on (default: localhost)")
    parser.add_argument(
        "--port", type=NumberOf(Port), help="port to listen on; 0: any free port (default: 8000)"
    )
    for role in Role:
        _add_role_arguments(parser, role)
    parser.add_argument(
        "--without-prefill",
        choices=[policy.value for policy in FailurePolicy],
        help="if no prefill instance is available: recompute lets decode instances compute "
        "prompts, fail rejects requests (default: recompute)",
    )
    parser.add_argument(
        "--first-token-from-prefill",
        action="store_true",
        default=None,
        help="send clients the token that the prefill instance has sampled, and let decode "
        "instances continue after it, wherever the answer stays that of one engine",
    )
    _add_access_arguments(parser)
    parser.add_argument(
        "--access-log", action="store_true", default=None, help="log one line per request"
    )
    add_log_arguments(parser)
    add_traces_argument(parser)


def _add_role_arguments(parser: Parser, role: Role) -> None:
    """Add the flags that name the instances of a role, and the policy that chooses among them."""
    name = _FLAGS[role]
    parser.add_argument(
        f"--{name}-hosts",
        f"--{name}-host",
        nargs="+",
        metavar="HOST",
        help=f"hosts of the {name}s, one per port or one for all ports (default: localhost)",
    )
    parser.add_argument(
        f"--{name}-ports",
        f"--{name}-port",
        nargs="+",
        type=NumberOf(Port),
        metavar="PORT",
        help="their ports, in the order of the hosts (default, without --config: "
        f"{_DEFAULT_PORTS[role]})",
    )
    parser.add_argument(
        f"--{name}s",
        nargs="+",
        metavar="URL",
        help=f"{name}s as http://HOST:PORT, or as dns://NAME:PORT for all addresses of a DNS "
        "name, which the router looks up again every few seconds",
    )
    default = getattr(RoutingOptions(), f"{role}_policy")
    parser.add_argument(
        f"--{role}-policy",
        choices=list(POLICIES),
        metavar="NAME",
        help=f"how a {role} instance is chosen: {', '.join(POLICIES)} (default: {default})",
    )


def _add_access_arguments(parser: Parser) -> None:
    parser.add_argument(
        "--api-key-file",
        metavar="FILE",
        help="file with the keys that clients must send, `TENANT KEY` or `KEY` in each line",
    )
    parser.add_argument(
        "--admin-key-file",
        metavar="FILE",
        help="file with the key for /admin and /dashboard (default: a key that is created in the "
        "runtime directory, for this user only)",
    )
    parser.add_argument(
        "--instance-key-file",
        metavar="FILE",
        help="file with the API key that the router sends to instances",
    )
    parser.add_argument(
        "--instance-ca-file",
        metavar="FILE",
        help="CA certificates to check the certificates of https:// instances",
    )
    parser.add_argument("--ssl-certfile", metavar="FILE", help="certificate file to serve TLS with")
    parser.add_argument("--ssl-keyfile", metavar="FILE", help="private key file of the certificate")
    parser.add_argument(
        "--cors-origins",
        nargs="+",
        metavar="ORIGIN",
        help="origins of web pages that may call the router from a browser; * for all",
    )


def run(arguments: argparse.Namespace) -> int:
    # Imported here, as below, because `kvferry proxy --help` must work without the extra [router].
    from kvferry.router.server import run_router

    configure_logs(log_settings(arguments))
    options, made_key = _with_admin_key(router_options(arguments))
    endpoint = find_traces_endpoint("proxy", options.otlp_traces_endpoint, os.environ)
    secret = ClusterSecret.load(os.environ)
    with _side_channel_sender(secret) as sender, _tracing(endpoint, options) as tracer:
        run_router(
            options,
            lambda: _make_app(options, sender, secret, tracer),
            lambda address: _announce(address, bool(options.access.ssl_certfile), made_key),
        )
    return 0


def _make_app(
    options: RouterOptions,
    sender: SideChannelSender,
    secret: ClusterSecret,
    tracer: "RouterTracer | None",
) -> "RouterApp":
    from kvferry.router.app import RouterApp
    from kvferry.router.conversations.turns import make_turn_query_by
    from kvferry.router.serving.legs import make_failure_query_by

    return RouterApp(
        options,
        sender,
        push_key=PushTicketKey(secret.key),
        registrar=Registrar(secret.key),
        make_turn_query=lambda watcher: make_turn_query_by(sender.query_turn, watcher.side_channel),
        make_failure_query=lambda watcher: make_failure_query_by(
            sender.query_failure, watcher.side_channel
        ),
        tracer=tracer,
    )


@contextmanager
def _tracing(endpoint: str, options: RouterOptions) -> "Iterator[RouterTracer | None]":
    """Open and close the exporter of spans; None if tracing is off."""
    if not endpoint:
        yield None
        return
    # Imported here, because the packages belong to the extra [tracing].
    from kvferry.router.tracing import RouterTracer
    from kvferry.tracing.exporter import TraceExporter

    attributes = {"service.instance.id": f"{options.host}:{options.port}"}
    tracer = RouterTracer(TraceExporter(endpoint, "kvferry-router", attributes))
    try:
        yield tracer
    finally:
        tracer.close()


def router_options(arguments: argparse.Namespace) -> RouterOptions:
    """Return the settings of the config file, overridden by the flags."""
    path = getattr(arguments, "config", None)
    options = RouterOptions() if path is None else read_config_file(_read(path), _read_key_file)
    named = {role: _members(arguments, role, is_default=path is None) for role in Role}
    instances = {
        role: tuple(entry for entry in entries if isinstance(entry, Instance))
        for role, entries in named.items()
    }
    from_file = (entry for entry in options.services if not named[entry.role])
    from_flags = (
        entry for entries in named.values() for entry in entries if isinstance(entry, ServiceName)
    )
    return replace(
        options,
        prefillers=instances[Role.PREFILL] if named[Role.PREFILL] else options.prefillers,
        decoders=instances[Role.DECODE] if named[Role.DECODE] else options.decoders,
        services=(*from_file, *from_flags),
        routing=_routing(options.routing, arguments),
        access=_access(options.access, arguments),
        **_given(arguments, ("host", "port", "access_log", "otlp_traces_endpoint")),
    )


def _members(
    arguments: argparse.Namespace, role: Role, is_default: bool
) -> tuple[Instance | ServiceName, ...]:
    """Return the instances and services of one role from the flags; empty if a config file names
    them.
    """
    urls = getattr(arguments, f"{_FLAGS[role]}s", None) or ()
    named = tuple(parse_member(role, url) for url in urls)
    hosts = getattr(arguments, f"{_FLAGS[role]}_hosts")
    ports = getattr(arguments, f"{_FLAGS[role]}_ports")
    if hosts is None and ports is None and (named or not is_default):
        return named
    pairs = pair_instances(role, hosts or ["localhost"], ports or [_DEFAULT_PORTS[role]])
    return (*pairs, *named)


def _routing(from_file: RoutingOptions, arguments: argparse.Namespace) -> RoutingOptions:
    names = ("prefill_policy", "decode_policy", "without_prefill", "first_token_from_prefill")
    given = _given(arguments, names)
    if "without_prefill" in given:
        given["without_prefill"] = FailurePolicy(given["without_prefill"])
    return replace(from_file, **given)


def _access(from_file: AccessOptions, arguments: argparse.Namespace) -> AccessOptions:
    given = read_access(_given(arguments, (*_ACCESS_FILES, "cors_origins")), _read_key_file)
    values = {field.name: getattr(given, field.name) for field in fields(given)}
    return replace(from_file, **{name: value for name, value in values.items() if value})


def _with_admin_key(options: RouterOptions) -> tuple[RouterOptions, Path | None]:
    """Return the options with an admin key, and the file of the key if kvferry makes the key."""
    if options.access.admin_key:
        return options, None
    directory = runtime_directory(os.environ)
    path = directory / _ADMIN_KEY_NAME
    made = read_or_make_private_file(directory, _ADMIN_KEY_NAME, "give --admin-key-file")
    key = made.decode("ascii", "replace")
    check_key(key, f"the key in {path}")
    return replace(options, access=replace(options.access, admin_key=key)), path


def _given(arguments: argparse.Namespace, names: tuple[str, ...]) -> dict[str, Any]:
    """Return the named arguments that the user gave."""
    return {name: value for name in names if (value := getattr(arguments, name, None)) is not None}


def _read_key_file(path: str) -> str:
    return read_private_file(path, "the key file is").decode("utf-8", "surrogateescape")


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path} cannot be read ({getattr(error, 'strerror', None) or error})"
        ) from None


def _announce(address: Address, is_tls: bool, made_key: Path | None) -> None:
    where = dialable(address)
    everywhere = "" if where == address else " and on every other address of this machine"
    scheme = "https" if is_tls else "http"
    lines = [
        f"kvferry proxy listens on {scheme}://{where}{everywhere}; dashboard: "
        f"{scheme}://{where}/dashboard"
    ]
    if made_key is not None:
        shown_path = shlex.quote(str(made_key))
        lines.append(
            f"the admin key for /admin and /dashboard is in {shown_path}; try curl -H "
            f'"Authorization: Bearer $(cat {shown_path})" {scheme}://{where}/admin/instances'
        )
    for line in lines:
        show(line)
    announce_address(where, os.environ)


@contextmanager
def _side_channel_sender(secret: ClusterSecret) -> Iterator[SideChannelSender]:
    """Start and close the sender by which the router releases P's blocks and asks engines for turns
    and reasons of failures.

    The router only connects to engines, so its own side channel listens on the loopback address
    alone.
    """
    kit = ConfiguredTransportKit.from_settings(SideChannelConfig(), secret, None, os.environ)
    sender = SideChannelSender(kit.control_transport())
    sender.start()
    try:
        yield sender
    finally:
        sender.close()
