"""Requests to vLLM servers: a prefill for a peer, the time to the first token, and metrics.

Requests block and have a timeout. A stream is read to its end, so that the server has finished the
request before the next one.
"""

import http.client
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from kvferry.bench.vllm.servers import MODEL_NAME
from kvferry.errors import TransportError
from kvferry.types import Address

REQUEST_S = 120.0
REMOTE_DECODE_PARAMS = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
FIRST_TOKEN_ID, END_TOKEN_ID = 10, 500
"""The range of token ids in prompts: ordinary tokens of the tiny model and of any other model."""
TRANSFER_TIME, DESCRIPTORS = "vllm:nixl_xfer_time_seconds", "vllm:nixl_num_descriptors"


@dataclass(frozen=True, slots=True)
class ServerTransferTotals:
    """What a decode server has reported about transfers since its start."""

    count: int
    seconds: float
    descriptors: int = 0
    """Descriptors, or copies where the transport has no descriptors."""

    def mean_since(self, before: "ServerTransferTotals") -> float | None:
        """Return the mean seconds per transfer since `before`; None if there was no transfer."""
        count = self.count - before.count
        return (self.seconds - before.seconds) / count if count > 0 else None


class PromptMaker:
    """Makes prompts of random tokens, all different, so that no prompt is in a cache.

    The same seed gives the same prompts.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def make(self, num_tokens: int) -> list[int]:
        return [self._random.randrange(FIRST_TOKEN_ID, END_TOKEN_ID) for _ in range(num_tokens)]


def prefill(address: Address, tokens: Sequence[int]) -> dict[str, Any]:
    """Let P compute the prompt and lease the blocks; return the parameters for D."""
    with VllmConnection(address) as connection:
        answer = json.loads(
            connection.post({**_body(tokens), "kv_transfer_params": REMOTE_DECODE_PARAMS}).read()
        )
    params = answer.get("kv_transfer_params")
    if not isinstance(params, dict):
        raise TransportError(f"{address} granted no lease for a prompt of {len(tokens)} tokens")
    return params


def time_to_first_token_s(
    address: Address, tokens: Sequence[int], params: dict[str, Any] | None = None
) -> float:
    """Return the seconds from sending the request to the first event of the stream with a token."""
    body = {**_body(tokens), "stream": True}
    if params is not None:
        body["kv_transfer_params"] = params
    with VllmConnection(address) as connection:
        since = time.perf_counter()
        first: float | None = None
        for line in connection.post(body):
            if first is None and line.startswith(b"data: {"):
                _check_event(address, line)
                first = time.perf_counter() - since
        if first is None:
            raise TransportError(f"{address} ended its stream without a token")
        return first


def read_transfers(address: Address) -> ServerTransferTotals | None:
    """Read the transfer totals; None if this server reports no transfer times."""
    with VllmConnection(address) as connection:
        text = connection.get("/metrics").decode()
    found = {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not _is_bucket(sample.name)
    }
    count, seconds = found.get(f"{TRANSFER_TIME}_count"), found.get(f"{TRANSFER_TIME}_sum")
    if count is None or seconds is None:
        return None
    return ServerTransferTotals(int(count), seconds, int(found.get(f"{DESCRIPTORS}_sum", 0)))


class VllmConnection:
    """One request; a status other than 200 raises TransportError with the server's message."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._http = http.client.HTTPConnection(address.host, address.port, timeout=REQUEST_S)

    def post(self, body: dict[str, Any]) -> http.client.HTTPResponse:
        return self._request("POST", "/v1/completions", json.dumps(body).encode())

    def get(self, path: str) -> bytes:
        return self._request("GET", path, None).read()

    def _request(self, method: str, path: str, body: bytes | None) -> http.client.HTTPResponse:
        try:
            self._http.request(method, path, body, {"Content-Type": "application/json"})
            answer = self._http.getresponse()
            if answer.status == 200:
                return answer
            body_text = answer.read()[:500].decode(errors="replace")
        except (OSError, http.client.HTTPException) as error:
            raise TransportError(
                f"{self._address} did not answer {method} {path}: {error or type(error).__name__}"
            ) from error
        raise TransportError(
            f"{self._address} answered {method} {path} with status {answer.status}: {body_text}"
        )

    def __enter__(self) -> "VllmConnection":
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()


def _body(tokens: Sequence[int]) -> dict[str, Any]:
    return {
        "model": MODEL_NAME,
        "prompt": list(tokens),
        "max_tokens": 1,
        "temperature": 0,
        "ignore_eos": True,
    }


def _check_event(address: Address, line: bytes) -> None:
    event = json.loads(line.removeprefix(b"data: "))
    if not event.get("choices"):
        raise TransportError(
            f"{address} sent {line[:300].decode(errors='replace').strip()} instead of a token"
        )


def _is_bucket(name: str) -> bool:
    return name.endswith("_bucket")
