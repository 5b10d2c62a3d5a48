"""Tests the `openai` package and `curl` against a real router with real engines."""

import asyncio
import json
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from tests.e2e.certificates import make_certificate
from tests.e2e.conftest import Pair
from tests.e2e.harness import Cluster, Engine

pytestmark = pytest.mark.slow

PROMPTS = [
    "The transfer worker crosses the river",
    "Once upon a time",
    "In the beginning",
    "A block of keys and values",
]
MESSAGES: list[Any] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Where is the transfer worker?"},
]
FIXED: dict[str, Any] = {
    "model": "tiny",
    "max_tokens": 12,
    "temperature": 0,
    "extra_body": {"ignore_eos": True},
}
KEY = "sk-e2e-one"


@pytest.fixture
def client(patient: Pair) -> Iterator[OpenAI]:
    with of(patient.router) as made:
        yield made


@pytest.fixture
def alone(plain: Engine) -> Iterator[OpenAI]:
    """A client of a single engine: its answers are the right ones."""
    with of(plain) as made:
        yield made


def of(engine: Engine) -> OpenAI:
    return OpenAI(base_url=f"{engine.url}/v1", api_key="none", max_retries=0, timeout=60.0)


def complete(client: OpenAI, prompt: str) -> str:
    return str(client.completions.create(prompt=prompt, **FIXED).choices[0].text)


def counts(usage: Any) -> tuple[int, int, int]:
    """Return the token counts without the number of cached tokens, which differs."""
    return usage.prompt_tokens, usage.completion_tokens, usage.total_tokens


# -- openai --


def test_completions_are_a_single_engines(client: OpenAI, alone: OpenAI) -> None:
    answers = [complete(client, prompt) for prompt in PROMPTS]
    assert answers == [complete(alone, prompt) for prompt in PROMPTS]
    assert len(set(answers)) > 1, "if all were alike, the comparison would see nothing"


def test_chats_are_a_single_engines(client: OpenAI, alone: OpenAI) -> None:
    said = [each.chat.completions.create(messages=MESSAGES, **FIXED) for each in (client, alone)]
    assert said[0].choices[0].message == said[1].choices[0].message
    assert counts(said[0].usage) == counts(said[1].usage)
    assert said[0].choices[0].message.content


def test_streams_bring_the_same_tokens_and_the_usage(client: OpenAI, alone: OpenAI) -> None:
    options: Any = {"stream": True, "stream_options": {"include_usage": True}, **FIXED}
    with client.chat.completions.create(messages=MESSAGES, **options) as stream:
        chunks = list(stream)
    whole = alone.chat.completions.create(messages=MESSAGES, **FIXED)
    assert (
        "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        == whole.choices[0].message.content
    )
    assert [counts(chunk.usage) for chunk in chunks if chunk.usage] == [counts(whole.usage)]
    segments = list(client.completions.create(prompt=PROMPTS[0], **options))
    assert "".join(segment.choices[0].text for segment in segments if segment.choices) == complete(
        alone, PROMPTS[0]
    )
    assert len(segments) > 2


def test_async_streams_at_once_do_not_mix(patient: Pair, alone: OpenAI) -> None:
    async def one(client: AsyncOpenAI, prompt: str) -> str:
        stream = await client.completions.create(prompt=prompt, stream=True, **FIXED)
        return "".join([segment.choices[0].text async for segment in stream if segment.choices])

    async def scene() -> list[str]:
        async with AsyncOpenAI(
            base_url=f"{patient.router.url}/v1", api_key="none", max_retries=0, timeout=60.0
        ) as client:
            return list(await asyncio.gather(*(one(client, prompt) for prompt in PROMPTS * 4)))

    assert asyncio.run(scene()) == [complete(alone, prompt) for prompt in PROMPTS] * 4


def test_several_choices_and_a_conversation(client: OpenAI, alone: OpenAI) -> None:
    options = {**FIXED, "n": 2, "extra_body": {"ignore_eos": True, "conversation_id": "c-1"}}
    said = client.completions.create(prompt=PROMPTS[0], **options)
    assert [choice.text for choice in said.choices] == [complete(alone, PROMPTS[0])] * 2
    assert not (said.model_extra or {}).get("kv_transfer_params")


def test_raw_answers_have_the_request_id(client: OpenAI) -> None:
    raw = client.completions.with_raw_response.create(
        prompt=PROMPTS[0], extra_headers={"X-Request-Id": "mine-1"}, **FIXED
    )
    assert (raw.status_code, raw.headers["x-request-id"], raw.request_id) == (
        200,
        "mine-1",
        "mine-1",
    )
    assert raw.parse().choices[0].text


def test_models_are_listed(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"max_tokens": 10**6}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"extra_body": {"conversation_id": 5}}, "conversation_id"),
        ({"prompt": ["one", [2, 3]]}, "prompt"),
        ({"model": "none"}, "none"),
    ],
)
def test_what_is_wrong_with_a_request_is_said_as_the_package_expects(
    client: OpenAI, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises((openai.BadRequestError, openai.NotFoundError)) as caught:
        client.completions.create(**{"prompt": "x", **FIXED, **changes})
    assert words in caught.value.message
    assert isinstance(caught.value.body, dict)
    assert {"message", "type"} <= set(caught.value.body)


# -- a router with API keys and TLS --


@pytest.fixture(scope="module")
def guarded(
    shared: Cluster, patient: Pair, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Engine, Path]]:
    folder = tmp_path_factory.mktemp("guarded")
    cert, key = make_certificate(folder)
    (folder / "keys").touch(mode=0o600)
    (folder / "keys").write_text(f"one {KEY}\n")
    flags = [
        "--api-key-file",
        str(folder / "keys"),
        "--ssl-certfile",
        str(cert),
        "--ssl-keyfile",
        str(key),
    ]
    router = shared.proxy([patient.p], [patient.d], *flags).ready()
    yield router, cert
    shared.dismiss(router.process)


def test_the_package_with_a_key_over_tls(guarded: tuple[Engine, Path], alone: OpenAI) -> None:
    router, cert = guarded
    http = openai.DefaultHttpxClient(
        verify=ssl.create_default_context(cafile=str(cert)), trust_env=False
    )
    options: Any = {
        "base_url": f"https://{router.address}/v1",
        "max_retries": 0,
        "http_client": http,
    }
    with OpenAI(api_key=KEY, **options) as client:
        assert complete(client, PROMPTS[1]) == complete(alone, PROMPTS[1])
        with pytest.raises(openai.AuthenticationError, match="API key"):
            client.with_options(api_key="sk-wrong").completions.create(prompt="x", **FIXED)


def test_curl_over_tls(guarded: tuple[Engine, Path]) -> None:
    router, cert = guarded
    url = f"https://{router.address}"
    trusted = ["--cacert", str(cert)]
    assert curl(*trusted, f"{url}/readyz").status == 200
    assert curl(*trusted, "-d", BODY, f"{url}/v1/completions").status == 401
    said = curl(*trusted, "-H", f"Authorization: Bearer {KEY}", "-d", BODY, f"{url}/v1/completions")
    assert (said.status, len(said.json()["choices"][0]["text"]) > 0) == (200, True)
    assert curl(f"{url}/readyz").failure == 60, "without it curl does not know us"


# -- curl --

BODY = json.dumps(
    {"model": "tiny", "prompt": PROMPTS[0], "max_tokens": 12, "temperature": 0, "ignore_eos": True}
)


class Said:
    def __init__(self, done: subprocess.CompletedProcess[bytes]) -> None:
        self.failure = done.returncode
        self.text, _, status = done.stdout.decode().rpartition("\n")
        self.status = int(status)

    def json(self) -> Any:
        return json.loads(self.text)


def curl(*words: str, stdin: bytes | None = None) -> Said:
    command = ["curl", "-sS", "--noproxy", "*", "--max-time", "60", "-w", "\n%{http_code}", *words]
    return Said(subprocess.run(command, input=stdin, capture_output=True))


def test_curl_plain_and_in_old_http_get_the_same(patient: Pair, alone: OpenAI) -> None:
    url = f"{patient.router.url}/v1/completions"
    right = complete(alone, PROMPTS[0])
    for words in (
        [],
        ["--http1.0"],
        ["--compressed"],
        ["-H", "Connection: close"],
        ["-H", "Transfer-Encoding: chunked"],
    ):
        said = curl(*words, "-H", "Content-Type: application/json", "-d", BODY, url)
        assert (said.failure, said.status, said.json()["choices"][0]["text"]) == (0, 200, right), (
            words
        )


@pytest.mark.parametrize("version", ["--http1.1", "--http1.0"])
def test_curl_streams(patient: Pair, alone: OpenAI, version: str) -> None:
    body = json.dumps({**json.loads(BODY), "stream": True})
    said = curl("-N", version, "-d", body, f"{patient.router.url}/v1/completions")
    events = [line.removeprefix("data: ") for line in said.text.splitlines() if line]
    assert (said.failure, events[-1]) == (0, "[DONE]")
    assert "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1]) == complete(
        alone, PROMPTS[0]
    )


def test_curl_asks_before_it_sends_much_and_is_let(patient: Pair, tmp_path: Path) -> None:
    (tmp_path / "body").write_text(json.dumps({**json.loads(BODY), "documents": "x" * 5_000_000}))
    log = tmp_path / "log"
    words = [
        "-H",
        "Expect: 100-continue",
        "--trace-ascii",
        str(log),
        "--data-binary",
        f"@{tmp_path / 'body'}",
    ]
    said = curl(*words, f"{patient.router.url}/v1/completions")
    assert (said.failure, said.status, len(said.json()["choices"])) == (0, 200, 1)
    assert "HTTP/1.1 100 Continue" in log.read_text()


def test_curl_is_told_what_is_not_there(patient: Pair) -> None:
    url = patient.router.url
    assert curl("-I", f"{url}/health").status == 200
    for words, status in (
        (["-I", f"{url}/v1/completions"], 405),
        ([f"{url}/v1/completions"], 405),
        ([f"{url}/v1/none"], 404),
    ):
        said = curl(*words)
        assert (said.failure, said.status) == (0, status)
    for sent in ("{", "[]", '{"prompt": 5}', '{"prompt": []}', "\x00"):
        said = curl("--data-binary", "@-", f"{url}/v1/completions", stdin=sent.encode())
        assert (said.status, bool(said.json()["error"]["message"])) == (400, True), sent


def test_curl_gets_the_routes_that_one_engine_serves_through_the_router(patient: Pair) -> None:
    def ask(path: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
        command = ["curl", "--silent", "--max-time", "60", "--write-out", "\n%{http_code}"]
        if body is not None:
            command += ["--json", json.dumps(body)]
        done = subprocess.run(
            [*command, patient.router.url + path], capture_output=True, check=True
        )
        text, _, status = done.stdout.rpartition(b"\n")
        return int(status), json.loads(text)

    status, found = ask("/tokenize", {"prompt": PROMPTS[0]})
    assert (status, found["count"]) == (200, len(found["tokens"]))
    assert ask("/detokenize", {"tokens": found["tokens"]})[0] == 200
    assert "version" in ask("/version")[1]
    assert ask("/ping")[0] == 200
    status, refusal = ask("/v1/embeddings", {"input": "a"})
    assert status == 404
    assert refusal["error"]["message"] == "no instance of the fleet has the route /v1/embeddings"
    status, refusal = ask("/v1/messages", {"messages": [], "max_tokens": 1})
    assert (status, refusal["error"]["type"]) == (404, "not_found_error")
    assert refusal["error"]["message"] == "POST /v1/messages: Not Found"
