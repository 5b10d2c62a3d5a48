"""Loads and unloads LoRA adapters on all instances of the fleet. Runs on the event loop.

If only some instances had an adapter, some requests for it would be served and others refused. So
the router sends a change to all instances and gives the operator one answer, which names the
instances that failed. Unloading counts an instance that lacks the adapter as done, so the operator
may repeat it until all instances agree. Instances never see the operator's admin key.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

import msgspec

from kvferry.errors import RequestRefused
from kvferry.router.fleet.instances import Instance
from kvferry.router.http.messages import ServerRequest, UpstreamError
from kvferry.router.http.via import via
from kvferry.router.serving.context import HttpResponse, build_error_response
from kvferry.router.serving.instance_client import UNAVAILABLE, InstanceClient, describe_error
from kvferry.web.errors import error_body, error_message

_FAILED = 502
_NOT_FOUND = 404
_LOAD, _UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


class AdapterResult(msgspec.Struct, frozen=True):
    """What one instance answered."""

    role: str
    url: str
    status: int
    message: str

    @property
    def is_done(self) -> bool:
        return 200 <= self.status < 300


@dataclass(slots=True)
class Adapters:
    """Handlers of the routes for LoRA adapters; both need the admin key."""

    instance_client: InstanceClient

    def routes(self) -> Mapping[str, Callable[[ServerRequest], Awaitable[HttpResponse]]]:
        return {_LOAD: self.change, _UNLOAD: self.change}

    async def change(self, request: ServerRequest) -> HttpResponse:
        """Send the request to every instance, and answer with the result of each."""
        # A server that is in the fleet in both roles gets the request once.
        members = self.instance_client.fleet.members()
        instances = {member.instance.address: member.instance for member in members}.values()
        if not instances:
            return build_error_response(UNAVAILABLE, "the fleet has no instance; try again", 1)
        results = await asyncio.gather(*(self._ask(instance, request) for instance in instances))
        return _combined_answer(request.path, results)

    async def _ask(self, instance: Instance, request: ServerRequest) -> AdapterResult:
        client, timeouts = self.instance_client, self.instance_client.options.timeouts
        key = client.options.access.instance_key
        # Not the request's own headers: they contain the router's admin key.
        headers = [("Content-Type", "application/json"), via(client.router_id, request.headers)]
        headers += [("Authorization", f"Bearer {key}")] if key else []
        try:
            with await client.upstreams.send(
                client.target(instance),
                "POST",
                request.path,
                headers,
                bytes(request.body),
                connect_timeout_s=timeouts.connect,
                head_timeout_s=timeouts.answer,
            ) as answer:
                status, message = answer.status, error_message(await client.read(answer))
        except UpstreamError as error:
            status, message = _FAILED, describe_error(error)
        return AdapterResult(instance.role, instance.url, status, message)


def _combined_answer(path: str, results: list[AdapterResult]) -> HttpResponse:
    """200 if all instances made the change, the common status if all failed alike, else 502."""
    done = [result for result in results if result.is_done]
    failed = [result for result in results if not result.is_done]
    if path == _UNLOAD and done:
        failed = [result for result in failed if result.status != _NOT_FOUND]
    headers = [("Content-Type", "application/json")]
    if not failed:
        body = {"message": done[0].message, "instances": results}
        return HttpResponse(200, headers, msgspec.json.encode(body))
    statuses = {result.status for result in results}
    status = statuses.pop() if len(statuses) == 1 else _FAILED
    verb = "loaded" if path == _LOAD else "unloaded"
    reasons = "; ".join(f"{result.url}: {result.message}" for result in failed)
    message = f"{len(done)} of {len(results)} instances {verb} the adapter; {reasons}"
    if path == _LOAD and done:
        message += ". Unload it before you load it again"
    error = msgspec.json.decode(error_body(RequestRefused(message, status=status)))
    return HttpResponse(status, headers, msgspec.json.encode({**error, "instances": results}))
