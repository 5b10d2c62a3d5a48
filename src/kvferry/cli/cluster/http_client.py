"""The HTTP requests that `kvferry up` sends to the processes of the cluster.

Requests block, have a timeout, and never use a configured proxy.
"""

import http.client
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvferry.cli.cluster.addresses import completion_path
from kvferry.config.fields import Bytes, Natural, converted
from kvferry.errors import ConfigError, RequestRefused, TransportError
from kvferry.types import Address

if TYPE_CHECKING:
    from prometheus_client.samples import Sample

_HEALTH_S = 2.0
_METRICS_S = 10.0


@dataclass(frozen=True, slots=True)
class Completion:
    """The text of an answer and the number of its tokens."""

    text: str
    tokens: int


@dataclass(frozen=True, slots=True)
class TransportTotals:
    """The number of transfers, bytes and seconds of one data transport."""

    transport: str
    transfers: int = 0
    total_bytes: int = 0
    seconds: float = 0.0

    @property
    def bytes_per_s(self) -> float:
        return self.total_bytes / self.seconds if self.seconds > 0 else 0.0

    def __add__(self, other: "TransportTotals") -> "TransportTotals":
        return TransportTotals(
            self.transport,
            self.transfers + other.transfers,
            self.total_bytes + other.total_bytes,
            self.seconds + other.seconds,
        )


def is_healthy(address: Address) -> bool:
    """Return whether /health answers 200."""
    try:
        return _call(address, "GET", "/health", None, _HEALTH_S)[0] == 200
    except TransportError:
        return False


def complete(address: Address, request: dict[str, Any], timeout_s: float) -> Completion:
    """Return the answer to one request.

    Raises RequestRefused if the server answers 400, TransportError if it fails otherwise; both have
    the server's error message.
    """
    status, body = _call(
        address, "POST", completion_path(request), json.dumps(request).encode(), timeout_s
    )
    try:
        answer = json.loads(body)
        if status == 200:
            choice = answer["choices"][0]
            return Completion(
                _text(choice),
                converted("completion_tokens", answer["usage"]["completion_tokens"], Natural),
            )
        reason = answer["error"]["message"]
    except (ValueError, LookupError, TypeError, ConfigError):
        reason = body[:500].decode(errors="replace")
    message = f"{address} answered the sample request with status {status}: {reason}"
    raise RequestRefused(message) if status == 400 else TransportError(message)


def _text(choice: dict[str, Any]) -> str:
    """Return the text of an answer; a model that reasons may end before it has answered."""
    if "message" not in choice:
        return str(choice["text"])
    message = choice["message"]
    return str(message["content"] or message.get("reasoning") or "")


def read_transport_totals(address: Address) -> list[TransportTotals]:
    """Return what the transports of an engine have moved so far, read from /metrics."""
    status, body = _call(address, "GET", "/metrics", None, _METRICS_S)
    if status != 200:
        raise TransportError(f"{address} answered /metrics with status {status}")
    try:
        return sum_transport_totals(_samples(body.decode()))
    except (ValueError, LookupError, ConfigError) as error:
        raise TransportError(
            f"the answer of {address} to /metrics cannot be parsed: {error}"
        ) from error


def sum_transport_totals(parts: Iterable[TransportTotals]) -> list[TransportTotals]:
    """Return one entry per transport that moved data, the busiest transport first."""
    totals: dict[str, TransportTotals] = {}
    for part in parts:
        totals[part.transport] = totals.get(part.transport, TransportTotals(part.transport)) + part
    return sorted(
        (total for total in totals.values() if total.transfers or total.total_bytes),
        key=lambda total: -total.total_bytes,
    )


def _samples(text: str) -> Iterable[TransportTotals]:
    """Yield one entry per sample; `sum_transport_totals` adds the entries of a transport."""
    # Imported here because commands that only ask for /health do without prometheus-client.
    from prometheus_client.parser import text_string_to_metric_families

    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == "kvferry:transfer_bytes_total":
                yield TransportTotals(sample.labels["transport"], total_bytes=int(_total(sample)))
            elif sample.name == "kvferry:transfer_seconds_total":
                yield TransportTotals(sample.labels["transport"], seconds=_total(sample))
            elif sample.name == "kvferry:transfers_total":
                yield TransportTotals(sample.labels["transport"], transfers=int(_total(sample)))


def _total(sample: "Sample") -> float:
    return float(converted(sample.name, sample.value, Bytes))


def _call(
    address: Address, method: str, path: str, body: bytes | None, timeout_s: float
) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(address.host, address.port, timeout=timeout_s)
    try:
        connection.request(method, path, body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read()
    except (OSError, http.client.HTTPException) as error:
        raise TransportError(
            f"{address} did not answer {method} {path}: {error or type(error).__name__}"
        ) from error
    finally:
        connection.close()
