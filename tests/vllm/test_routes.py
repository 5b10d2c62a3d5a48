"""Tests the routes of real vLLM through the router, with the packages that applications use: the
answers are those of one engine, P's KV was used where the body allows it, and all blocks are free.
"""

import asyncio
import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from openai import NotFoundError, OpenAI
from tests.clients.environment import ask_with
from tests.e2e.harness import Engine, metrics, new_session
from tests.vllm.conftest import Trio
from tests.vllm.fleet import ready
from tests.vllm.vllm_asking import assert_free

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

MODEL = "tiny"
LOADS = "kvferry:finished_loads_total"
MAX_TOKENS = 12


def question(about: str) -> str:
    """A prompt of several blocks that no other test asks."""
    return f"{about}: " + " ".join(f"ferry {number} leaves" for number in range(40))


def client_of(engine: Engine) -> OpenAI:
    return OpenAI(base_url=f"{engine.url}/v1", api_key="sk-a", max_retries=0, timeout=60)


@contextmanager
def loads(trio: Trio, count: int) -> Iterator[None]:
    """Check that D fetches P's KV this many times, and that all blocks are free afterwards."""
    before = asyncio.run(_loads(trio))
    yield
    assert asyncio.run(_loads(trio)) - before == count
    asyncio.run(_check_free(trio))


async def _loads(trio: Trio) -> float:
    async with new_session(60) as session:
        return (await metrics(session, trio.d)).get(LOADS, 0.0)


async def _check_free(trio: Trio) -> None:
    async with new_session(60) as session:
        await assert_free(session, trio.p, trio.d)


def post(engine: Engine, path: str, body: Any) -> tuple[int, Any]:
    """What `curl` shows for a JSON body."""
    command = ["curl", "--silent", "--max-time", "60", "--write-out", "\n%{http_code}"]
    command += ["--header", "Content-Type: application/json", "--data-binary", "@-"]
    done = subprocess.run(
        [*command, engine.url + path],
        input=json.dumps(body).encode(),
        capture_output=True,
        check=True,
    )
    text, _, status = done.stdout.rpartition(b"\n")
    return int(status), json.loads(text)


def test_responses_whole_and_streamed_are_those_of_one_engine(trio: Trio) -> None:
    asked: dict[str, Any] = {
        "model": MODEL,
        "instructions": "Answer as a ferry pilot.",
        "input": question("responses"),
        "max_output_tokens": MAX_TOKENS,
        "temperature": 0.0,
    }
    with client_of(trio.p) as alone, client_of(trio.router) as client:
        right = alone.responses.create(**asked).output_text
        with loads(trio, 2):
            assert client.responses.create(**asked).output_text == right
            asked["input"] = question("responses streamed")
            right = alone.responses.create(**asked).output_text
            with client.responses.create(**asked, stream=True) as stream:
                events = list(stream)
        assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
        assert events[-1].type == "response.completed"
        text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
        assert text == right


def test_a_stored_response_is_found_again_and_continued(trio: Trio) -> None:
    asked: dict[str, Any] = {"model": MODEL, "max_output_tokens": MAX_TOKENS, "temperature": 0.0}
    with client_of(trio.router) as client:
        first = client.responses.create(**asked, input=question("stored"))
        assert client.responses.retrieve(first.id).output_text == first.output_text
        then = client.responses.create(**asked, input="And then?", previous_response_id=first.id)
        assert then.usage is not None
        assert first.usage is not None
        assert then.usage.input_tokens > first.usage.input_tokens
        later = client.responses.create(**asked, input=question("background"), background=True)
        assert later.status == "queued"
        client.responses.cancel(later.id)
        with pytest.raises(NotFoundError):
            client.responses.retrieve(first.id[:-1] + "x")
    asyncio.run(_check_free(trio))


def test_messages_are_those_of_one_engine(trio: Trio) -> None:
    asked = {
        "model": MODEL,
        "system": "Answer as a ferry pilot.",
        "messages": [{"role": "user", "content": question("messages")}],
        "max_tokens": MAX_TOKENS,
        "temperature": 0.0,
    }
    right = post(trio.p, "/v1/messages", asked)[1]["content"]
    with loads(trio, 1):
        assert post(trio.router, "/v1/messages", asked)[1]["content"] == right


def test_token_ids_are_those_of_one_engine(trio: Trio) -> None:
    asked = {
        "token_ids": [(7 * position) % 400 + 10 for position in range(200)],
        "sampling_params": {"max_tokens": MAX_TOKENS, "temperature": 0.0, "min_tokens": 2},
    }
    right = post(trio.p, "/inference/v1/generate", asked)[1]["choices"]
    with loads(trio, 1):
        assert post(trio.router, "/inference/v1/generate", asked)[1]["choices"] == right


@pytest.mark.parametrize("client", ["anthropic", "litellm", "langchain"])
def test_other_packages_get_the_answers_of_one_engine(trio: Trio, client: str) -> None:
    found = ask_with(client, trio.router.url, MODEL)
    assert found == ask_with(client, trio.p.url, MODEL)
    assert found["whole"] == found["streamed"] != ""
    asyncio.run(_check_free(trio))


def test_tools_and_structured_output_are_those_of_one_engine(trio: Trio) -> None:
    port = {"type": "string", "enum": ["Harwich", "Esbjerg"]}
    schema = {
        "type": "object",
        "properties": {"port": port},
        "required": ["port"],
        "additionalProperties": False,
    }
    asked: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": question("structured")}],
        "max_tokens": 256,
        "temperature": 0.0,
    }
    form: Any = {"type": "json_schema", "json_schema": {"name": "port", "schema": schema}}
    tool: Any = {"type": "function", "function": {"name": "port", "parameters": schema}}
    chosen: Any = {"type": "function", "function": {"name": "port"}}
    with client_of(trio.p) as alone, client_of(trio.router) as client, loads(trio, 2):
        texts = [
            one.chat.completions.create(**asked, response_format=form).choices[0].message.content
            for one in (alone, client)
        ]
        assert texts[0] == texts[1]
        assert json.loads(texts[1])["port"] in port["enum"]
        asked["messages"] = [{"role": "user", "content": question("tools")}]
        calls = [
            one.chat.completions.create(**asked, tools=[tool], tool_choice=chosen)
            .choices[0]
            .message.tool_calls[0]
            .function
            for one in (alone, client)
        ]
        assert calls[0] == calls[1]
        assert calls[1].name == "port"


def test_embeddings_and_scores_come_from_the_one_server_that_has_them(trio: Trio) -> None:
    """D lacks these routes, and the router finds the server that has them."""
    embeds = trio.fleet.vllm("embeds", "--runner", "pooling", "--convert", "embed", transfer=None)
    ready(embeds)
    router = trio.fleet.kvferry_router([trio.p], [trio.d, embeds])
    ready(router)
    texts = [question("harbour"), question("ferry"), "A short one."]
    pair = {"queries": texts[0], "documents": texts[1:]}
    for path, fields in (
        ("/v1/embeddings", {"input": texts}),
        ("/pooling", {"input": texts[2]}),
        ("/score", pair),
        ("/v1/rerank", {"query": texts[0], "documents": texts[1:]}),
    ):
        asked = {"model": MODEL, **fields}
        (status, right), (routed, found) = (post(one, path, asked) for one in (embeds, router))
        assert (status, routed) == (200, 200), (path, right, found)
        results = "results" if "results" in right else "data"
        assert len(found[results]) == len(right[results]) > 0
        assert found[results] == right[results], path
    trio.fleet.stop(router)
    trio.fleet.stop(embeds)


def test_routes_without_kv_are_served_by_one_instance(trio: Trio) -> None:
    text = {"model": MODEL, "prompt": question("tokenize")}
    status, tokens = post(trio.router, "/tokenize", text)
    assert (status, tokens) == post(trio.d, "/tokenize", text)
    back = {"model": MODEL, "tokens": tokens["tokens"]}
    assert post(trio.router, "/detokenize", back) == post(trio.d, "/detokenize", back)
    status, refusal = post(trio.router, "/v1/embeddings", {"model": MODEL, "input": "a"})
    assert status == 404
    assert refusal["error"]["message"] == "no instance of the fleet has the route /v1/embeddings"
    # The servers of this fleet have this route.
    status, refusal = post(trio.router, "/reset_prefix_cache", {})
    assert status == 403
    status, refusal = post(trio.router, "/v1/messages", {"model": MODEL, "messages": 3})
    assert (status, refusal["type"]) == (400, "error")
