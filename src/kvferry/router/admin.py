"""The admin API: lists and changes the fleet while requests are served.

    GET    /admin/instances
    GET    /admin/targets              the instances, for Prometheus' http_sd
    POST   /admin/instances            {"role": "prefill", "url": "http://10.0.0.7:8000"}
    POST   /admin/instances/drain      same body: no new legs; running legs finish
    DELETE /admin/instances            same body: removed at once; running legs continue

An engine that registers itself sends a statement sealed with the cluster secret to POST
/admin/register, renews the statement, and needs no key. Runs on the event loop; the only side
effects are on the fleet and the callbacks.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec

from kvferry.errors import ConfigError, InvalidTicket
from kvferry.router.fleet.fleet import Fleet
from kvferry.router.fleet.instances import Instance, Role, parse_instance
from kvferry.router.fleet.members import Member
from kvferry.router.fleet.registration import ROUTER_ID_HEADER, AcceptedStatements, Registrar
from kvferry.router.serving.context import HttpResponse, build_error_response


class _Named(msgspec.Struct):
    role: Role
    url: str


class _Registration(msgspec.Struct):
    statement: str


class MemberView(msgspec.Struct, frozen=True):
    """One member of the fleet in the answers of the admin API."""

    role: str
    url: str
    state: str
    running: int
    failures: int
    last_error: str
    is_registered: bool
    """True if the instance registered itself and is removed unless it renews."""


@dataclass(slots=True)
class Admin:
    """Handlers of the admin API."""

    fleet: Fleet
    registrar: Registrar | None
    """None: without the cluster secret no instance can register."""
    on_change: Callable[[], None]
    """Called after every change of the fleet."""
    on_instance_gone: Callable[[Instance], object]
    """Called when an instance was removed."""
    statements: AcceptedStatements

    def routes(self) -> Mapping[str, Mapping[str, Callable[[bytes], HttpResponse]]]:
        return {
            "/admin/instances": {"GET": self.show, "POST": self.add, "DELETE": self.remove},
            "/admin/instances/drain": {"POST": self.drain},
            "/admin/targets": {"GET": self.targets},
            "/admin/register": {"POST": self.register},
        }

    def show(self, _: bytes) -> HttpResponse:
        return _json(200, {"instances": [_view(member) for member in self.fleet.members()]})

    def targets(self, _: bytes) -> HttpResponse:
        """The instances in the format of Prometheus' HTTP service discovery."""
        groups = [
            {
                "targets": [str(member.instance.address)],
                "labels": {
                    "__scheme__": "https" if member.instance.tls else "http",
                    "role": str(member.instance.role),
                },
            }
            for member in self.fleet.members()
        ]
        return _json(200, groups)

    def add(self, body: bytes) -> HttpResponse:
        return self._change(
            body, lambda instance: self.fleet.add(instance, time.monotonic()), 201, must_exist=False
        )

    def drain(self, body: bytes) -> HttpResponse:
        return self._change(body, self.fleet.drain, 200)

    def remove(self, body: bytes) -> HttpResponse:
        return self._change(body, self._remove, 200)

    def register(self, body: bytes) -> HttpResponse:
        if self.registrar is None:
            return build_error_response(
                403,
                "this router has no cluster secret, so instances cannot register; set "
                "KVFERRY_SECRET_FILE",
            )
        try:
            now = time.time()
            statement = self.registrar.open(
                msgspec.json.decode(body, type=_Registration).statement, now
            )
            instance = parse_instance(statement.role, statement.url)
            self.fleet.check_foreign(instance)
            if statement.router_id != self.statements.router_id:
                return build_error_response(
                    409,
                    f"the statement must name this router in router_id; {ROUTER_ID_HEADER} has it",
                    headers=[(ROUTER_ID_HEADER, self.statements.router_id)],
                )
            self.statements.accept(statement, instance, now)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return build_error_response(
                400, 'send {"statement": "…"}, signed with the cluster\'s secret'
            )
        except ConfigError as error:
            return build_error_response(400, str(error))
        except InvalidTicket as error:
            return build_error_response(403, str(error))
        if statement.is_leaving:
            self.fleet.leave(instance)
        else:
            self.fleet.renew(instance, statement.ttl_s, time.monotonic())
        self.on_change()
        return _json(200, {"ttl_s": statement.ttl_s})

    def _change(
        self,
        body: bytes,
        change: Callable[[Instance], object],
        status: int,
        must_exist: bool = True,
    ) -> HttpResponse:
        try:
            named = msgspec.json.decode(body, type=_Named)
            instance = parse_instance(named.role, named.url)
            if not must_exist:
                self.fleet.check_foreign(instance)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            return build_error_response(
                400, f'send {{"role": "prefill" or "decode", "url": "http://HOST:PORT"}}: {error}'
            )
        except ConfigError as error:
            return build_error_response(400, str(error))
        if must_exist and self.fleet.get(instance) is None:
            return build_error_response(404, f"{instance} is not in the fleet")
        change(instance)
        self.on_change()
        member = self.fleet.get(instance)
        return _json(
            status,
            _view(member)
            if member is not None
            else {"role": instance.role, "url": instance.url, "state": "gone"},
        )

    def _remove(self, instance: Instance) -> None:
        self.fleet.remove(instance)
        self.on_instance_gone(instance)


def _view(member: Member) -> MemberView:
    return MemberView(
        role=member.instance.role,
        url=member.instance.url,
        state=member.state(time.monotonic()),
        running=member.num_running,
        failures=member.breaker.failures_in_a_row,
        last_error=member.record.last_error,
        is_registered=not member.is_static,
    )


def _json(status: int, value: object) -> HttpResponse:
    return HttpResponse(status, [("Content-Type", "application/json")], msgspec.json.encode(value))
