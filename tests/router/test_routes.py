"""Tests the routes besides completions and chats: which instances a request reaches, what bodies
they get, what the client gets when they fail, and that nothing is left afterwards.
"""

import asyncio
import json
from typing import Any

import aiohttp
import pytest
import uvloop
from aiohttp import web
from openai import OpenAI
from tests.router.stubs import (
    AS_ADMIN,
    PARAMS,
    Behaviour,
    Stage,
    answers,
    completes,
    drops_connection,
    hangs,
    prefills,
    stage,
    streams,
)
from tests.router.test_proxy import message
from yarl import URL

from kvferry.errors import ConfigError
from kvferry.router.fleet.instances import Role, parse_instance
from kvferry.router.options import RoutingOptions
from kvferry.router.routes.error_shapes import error_event, shape_error
from kvferry.router.routes.response_ids import find_holder, make_response_id
from kvferry.router.routes.table import Api, RouteTable, Service

RESPONSE = {"model": "m", "instructions": "be short", "input": "hi", "max_output_tokens": 9}
MESSAGE = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
TOKENS = {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 9, "min_tokens": 3, "seed": 1}}
UNKNOWN = answers(404, '{"detail":"Not Found"}')
UNSUPPORTED = answers(501, '{"error":{"message":"The model does not support Rerank API"}}')
NO_MODEL = answers(404, '{"error":{"message":"The model `x` does not exist."}}')
KEYS = (("one", "sk-one"), ("two", "sk-two"))


async def assert_idle(s: Stage) -> None:
    """No request, no leg and no block is left. The router counts a request until its end, so this
    waits for the end of a request whose client has disconnected.
    """
    while await s.metric("kvferry:router_active_requests") > 1:  # the request for /metrics itself
        await asyncio.sleep(0)
    async with s.session.get(f"{s.url}/admin/instances", headers=AS_ADMIN) as answer:
        members = (await answer.json())["instances"]
    assert [member["running"] for member in members] == [0] * len(members)


# -- two legs --


@pytest.mark.parametrize(
    ("path", "body", "p_fields"),
    [
        ("/v1/responses", RESPONSE, {"max_output_tokens": 1, "store": False}),
        ("/v1/messages", MESSAGE, {"max_tokens": 1}),
        ("/inference/v1/generate", TOKENS, {"sampling_params": {"max_tokens": 1, "seed": 1}}),
    ],
)
def test_a_route_that_carries_params_gets_a_prefill_and_a_decode_leg(
    path: str, body: dict[str, Any], p_fields: dict[str, Any]
) -> None:
    async def scene() -> None:
        async with stage(prefills, completes) as s:
            sent = {**body, "kv_transfer_params": {"remote_host": "evil"}, "stream": "no"}
            status, _, _ = await s.post(sent, path)
            assert status == 200
            assert (s.p.calls[0].path, s.d.calls[0].path) == (path, path)
            asked = s.p.calls[0].body
            assert asked.pop("kv_transfer_params")["do_remote_decode"] is True
            assert asked == {**body, "stream": False, **p_fields}
            given = s.d.calls[0].body
            assert given.pop("kv_transfer_params")["ticket"] == PARAMS["ticket"]
            given.pop("request_id", None)
            assert given == {**body, "stream": False}
            assert s.releases.tickets == []
            await assert_idle(s)

    uvloop.run(scene())


def test_a_ticket_that_a_client_hides_in_sampling_params_reaches_no_engine() -> None:
    async def scene() -> None:
        async with stage(prefills, completes) as s:
            hidden = {"extra_args": {"kv_transfer_params": {"ticket": "stolen"}, "a": 1}}
            await s.post({**TOKENS, "sampling_params": hidden}, "/inference/v1/generate")
            assert s.d.calls[0].body["sampling_params"] == {"extra_args": {"a": 1}}
            assert b"stolen" not in s.p.calls[0].raw

    uvloop.run(scene())


CREATED = b'event: response.created\ndata: {"response":{},"type":"response.created"}\n\n'
DELTA = b'event: response.output_text.delta\ndata: {"delta":"hi"}\n\n'
ERROR = b'event: error\ndata: {"type":"error","error":{"type":"internal_error","message":"x"}}\n\n'


@pytest.mark.parametrize(
    ("path", "body", "failing"),
    [
        ("/v1/responses", RESPONSE, streams([CREATED], then="drop")),
        ("/v1/responses", RESPONSE, streams([CREATED, b'data: {"error":{"message":"x"}}\n\n'])),
        ("/v1/messages", MESSAGE, streams([ERROR])),
    ],
)
def test_a_stream_that_fails_before_its_first_token_is_repeated_on_another_d(
    path: str, body: dict[str, Any], failing: Behaviour
) -> None:
    async def scene() -> None:
        good = streams([CREATED, DELTA])
        async with stage(prefills, [failing, good], max_retries=2) as s:
            for _ in range(2):  # instances take turns
                status, _, text = await s.post({**body, "stream": True}, path)
                assert (status, text) == (200, CREATED + DELTA)
            assert s.decoders[0].calls
            await assert_idle(s)

    uvloop.run(scene())


def test_a_broken_stream_ends_with_an_error_of_its_api() -> None:
    async def scene() -> None:
        async with stage(prefills, streams([DELTA], then="drop")) as s:
            for path, body in (("/v1/responses", RESPONSE), ("/v1/messages", MESSAGE)):
                _, _, text = await s.post({**body, "stream": True}, path)
                event = text.removeprefix(DELTA).strip().removeprefix(b"event: error\ndata: ")
                shown = json.loads(event)
                assert shown["type"] == "error"
                assert "did not complete its answer" in shown["error"]["message"]
            assert s.releases.tickets == ["ticket-1"] * 2
            await assert_idle(s)

    uvloop.run(scene())


# -- stored responses --


async def stores(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """Answers like an engine that stores responses."""
    if request.method == "GET":
        return web.json_response(
            {"id": request.path.rpartition("/")[2], "query": request.query_string}
        )
    return web.json_response({"id": body.get("request_id", request.path)})


def test_a_stored_response_is_asked_of_the_instance_that_made_it() -> None:
    async def scene() -> None:
        async with stage(prefills, [stores, stores, stores]) as s:
            for _ in range(6):
                named = json.loads((await s.post(RESPONSE, "/v1/responses"))[2])["id"]
                holder = next(d for d in s.decoders if d.calls)
                url = f"{s.url}/v1/responses/{named}"
                async with s.session.get(url + "?stream=true&starting_after=3") as answer:
                    assert (await answer.json()) == {
                        "id": named,
                        "query": "stream=true&starting_after=3",
                    }
                continued = {**RESPONSE, "previous_response_id": named}
                assert (await s.post(continued, "/v1/responses"))[0] == 200
                assert (await s.post(b"", f"/v1/responses/{named}/cancel"))[0] == 200
                assert [call.path for call in holder.calls] == [
                    "/v1/responses",
                    f"/v1/responses/{named}",
                    "/v1/responses",
                    f"/v1/responses/{named}/cancel",
                ]
                holder.calls.clear()
            assert len(s.p.calls) == 6, "P cannot continue a response that it does not have"
            await assert_idle(s)

    uvloop.run(scene())


def test_a_response_of_another_tenant_is_not_found() -> None:
    async def scene() -> None:
        one, two = ({"Authorization": f"Bearer {key}"} for _, key in KEYS)
        async with stage(prefills, stores, api_keys=KEYS) as s:
            named = json.loads((await s.post(RESPONSE, "/v1/responses", **one))[2])["id"]
            for headers, status in ((one, 200), (two, 404)):
                async with s.session.get(
                    f"{s.url}/v1/responses/{named}", headers=headers
                ) as answer:
                    assert answer.status == status
            continued = {**RESPONSE, "previous_response_id": named}
            assert (await s.post(continued, "/v1/responses", **two))[0] == 404
            assert (await s.post({**RESPONSE, "previous_response_id": 3}, "/v1/responses", **one))[
                0
            ] == 400

    uvloop.run(scene())


def test_a_client_cannot_choose_the_id_of_a_response() -> None:
    async def scene() -> None:
        async with stage(prefills, stores) as s:
            body = {**RESPONSE, "request_id": "resp_mine", "background": "yes"}
            named = json.loads((await s.post(body, "/v1/responses"))[2])["id"]
            assert named != "resp_mine"
            assert s.d.calls[0].body["background"] is True
            assert s.p.calls == [], "a response made in the background has no prefill leg"
            await s.post({**RESPONSE, "request_id": "resp_mine"}, "/v1/responses")
            assert "request_id" not in s.p.calls[0].body

    uvloop.run(scene())


def test_ids_of_responses_lead_to_one_instance_for_one_tenant() -> None:
    fleet = [parse_instance(Role.DECODE, f"10.0.0.{number}:8000") for number in range(9)]
    named = make_response_id("0" * 32, "a", fleet[4])
    assert find_holder(named, "a", fleet) == fleet[4]
    assert find_holder(named, "b", fleet) is None
    assert find_holder(named, "a", fleet[5:]) is None
    for wrong in ("", "resp_", named[5:], named[:-1], named + "0", "resp_" + "\ud800" * 48):
        assert find_holder(wrong, "a", fleet) is None


# -- one instance --


def test_a_route_without_kv_goes_to_a_decode_instance_as_the_client_wrote_it() -> None:
    async def scene() -> None:
        async with stage(prefills, completes) as s:
            body = {"model": "m", "input": ["a", "b"], "kv_transfer_params": {"ticket": "stolen"}}
            status, _, text = await s.post(body, "/v1/embeddings")
            assert (status, json.loads(text)["id"]) == (200, "d")
            assert s.d.calls[0].body == {"model": "m", "input": ["a", "b"]}
            assert s.p.calls == []
            await assert_idle(s)

    uvloop.run(scene())


def test_an_instance_that_lacks_a_path_is_not_asked_for_it_again() -> None:
    async def scene() -> None:
        async with stage(completes, [UNKNOWN, UNKNOWN]) as s:
            for _ in range(3):
                assert (await s.post({"query": "a"}, "/rerank"))[0] == 200
            assert [len(engine.calls) for engine in s.decoders] == [1, 1]
            assert len(s.p.calls) == 3
            async with s.session.get(f"{s.url}/version") as answer:
                assert answer.status == 200
            assert sum(len(engine.calls) for engine in s.decoders) == 4, (
                "each D is asked for another path"
            )

    uvloop.run(scene())


@pytest.mark.parametrize(
    "unknown",
    [UNKNOWN, UNSUPPORTED, answers(404, '{"error":{"message":"POST /rerank: Not Found"}}')],
)
def test_a_route_that_no_instance_has_is_a_404_that_says_so(unknown: Behaviour) -> None:
    async def scene() -> None:
        async with stage(unknown, unknown) as s:
            for _ in range(2):
                status, _, text = await s.post({"query": "a"}, "/rerank")
                assert (status, message(text)) == (
                    404,
                    "no instance of the fleet has the route /rerank",
                )
            assert (len(s.p.calls), len(s.d.calls)) == (1, 1)

    uvloop.run(scene())


def test_a_path_that_no_engine_knows_leaves_other_paths_of_its_pattern_available() -> None:
    async def knows_one(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        is_known = request.path == "/v1/audio/transcriptions"
        return await (completes if is_known else UNKNOWN)(request, body)

    async def scene() -> None:
        async with stage(knows_one, knows_one) as s:
            assert (await s.post({"a": 1}, "/v1/audio/x"))[0] == 404
            assert (await s.post({"a": 1}, "/v1/audio/transcriptions"))[0] == 200

    uvloop.run(scene())


def test_decisions_are_asked_of_the_instance_whose_model_can_make_them() -> None:
    """A route of vLLM 0.33, which has a cache salt but no transfer parameters."""
    lacks = answers(501, '{"error":{"message":"The model does not support the Decisions API"}}')
    sent = {"input": "a", "cache_salt": "s", "questions": [], "kv_transfer_params": PARAMS}

    async def scene() -> None:
        async with stage(prefills, [lacks, completes]) as s:
            for _ in range(3):
                assert (await s.post(sent, "/v1/decisions"))[0] == 200
            kept = {name: value for name, value in sent.items() if name != "kv_transfer_params"}
            assert [call.body for call in s.decoders[1].calls] == [kept] * 3
            assert (len(s.decoders[0].calls), len(s.p.calls)) == (1, 0)

    uvloop.run(scene())


def test_what_vllm_0_33_renders_can_be_generated() -> None:
    """It renders transfer parameters beside `sampling_params`, and no longer inside."""
    rendered = {**TOKENS, "kv_transfer_params": None, "ec_transfer_params": None}

    async def renders(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if request.path.endswith("/render"):
            return web.json_response(
                rendered | {"kv_transfer_params": body.get("kv_transfer_params")}
            )
        return await completes(request, body)

    async def scene() -> None:
        async with stage(prefills, renders) as s:
            asked = {"prompt": "a", "kv_transfer_params": {"ticket": "stolen"}}
            _, _, answer = await s.post(asked, "/v1/completions/render")
            assert json.loads(answer) == rendered
            assert (await s.post(json.loads(answer), "/inference/v1/generate"))[0] == 200
            given = s.d.calls[-1].body
            assert given.pop("kv_transfer_params")["ticket"] == PARAMS["ticket"]
            assert given == {**TOKENS, "ec_transfer_params": None}

    uvloop.run(scene())


def test_a_501_for_a_missing_feature_is_passed_to_the_client() -> None:
    async def scene() -> None:
        lacks = answers(501, '{"error":{"message":"no such dimensions"}}')
        async with stage([], lacks) as s:
            for number in range(2):
                status, _, _ = await s.post({"input": "a"}, "/v1/embeddings")
                assert (status, len(s.d.calls)) == (501, number + 1)

    uvloop.run(scene())


def test_a_request_that_every_instance_answers_with_500_ejects_none() -> None:
    async def scene() -> None:
        async with stage(prefills, [answers(500, "{}"), answers(500, "{}")]) as s:
            for _ in range(10):
                assert (await s.post({"a": 1}, "/tokenize"))[0] == 500
            async with s.session.get(f"{s.url}/admin/instances", headers=AS_ADMIN) as answer:
                states = {each["state"] for each in (await answer.json())["instances"]}
            assert "cooldown" not in states

    uvloop.run(scene())


def test_a_request_to_a_forwarded_route_is_not_repeated_after_it_may_have_run() -> None:
    async def scene() -> None:
        broken = answers(500, "{}")
        async with stage([], [broken, broken], forwarded_routes=("/mine",), max_retries=2) as s:
            assert (await s.post({"a": 1}, "/mine"))[0] == 500
            assert sum(len(engine.calls) for engine in s.decoders) == 1

    uvloop.run(scene())


@pytest.mark.parametrize("path", ["/tokenize", "/v1/embeddings"])
def test_a_body_of_transfer_params_alone_arrives_as_an_empty_object(path: str) -> None:
    async def scene() -> None:
        async with stage(prefills, completes) as s:
            await s.post({"kv_transfer_params": {"ticket": "stolen"}}, path)
            assert s.d.calls[0].body == {}

    uvloop.run(scene())


@pytest.mark.parametrize("name", ["kv_transfer_params", r"kv\u005Ftransfer\u005fparams"])
@pytest.mark.parametrize("num_before", [0, *range(2**20 - 380, 2**20, 29)])
def test_a_form_with_transfer_params_is_refused(name: str, num_before: int) -> None:
    """Wherever the name is: the router looks at a form in parts of 1 MiB."""

    async def scene() -> None:
        async with stage(prefills, completes) as s:
            fields = {"file": "a" * num_before, "vllm_xargs": f'{{"{name}": ""}}'}
            form = aiohttp.FormData(fields, default_to_multipart=True)
            async with s.session.post(f"{s.url}/v1/audio/transcriptions", data=form) as answer:
                assert answer.status == 400
            assert s.d.calls == []

    uvloop.run(scene())


@pytest.mark.parametrize(("num_escapes", "expected"), [(1000, 200), (1001, 400)])
def test_a_form_with_very_many_escapes_is_refused(num_escapes: int, expected: int) -> None:
    async def scene() -> None:
        async with stage(prefills, completes) as s:
            fields = {"prompt": num_escapes * r"\u0041"}
            form = aiohttp.FormData(fields, default_to_multipart=True)
            async with s.session.post(f"{s.url}/v1/audio/transcriptions", data=form) as answer:
                assert answer.status == expected

    uvloop.run(scene())


@pytest.mark.parametrize(
    ("charset", "expected"),
    [
        ("", 200),
        ("; charset=UTF-8", 200),
        ('; charset="utf-8" ', 200),
        ("; charset=utf-7", 400),
        ("; Charset*=utf-8''utf-7", 400),
        ("; charset=utf-8; charset=utf-7", 400),
        ("; charset=utf-8x", 400),
    ],
)
def test_a_form_has_no_charset_that_could_hide_a_field(charset: str, expected: int) -> None:
    body = b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\nm\r\n--b--\r\n'
    headers = {"Content-Type": f"multipart/form-data; boundary=b{charset}"}

    async def scene() -> None:
        async with stage(prefills, completes) as s:
            url = f"{s.url}/v1/audio/transcriptions"
            async with s.session.post(url, data=body, headers=headers) as answer:
                assert answer.status == expected
            assert len(s.d.calls) == (expected == 200)

    uvloop.run(scene())


@pytest.mark.parametrize("of_p", [completes, UNKNOWN, NO_MODEL])
@pytest.mark.parametrize("of_d", [UNKNOWN, NO_MODEL])
def test_a_model_that_is_not_there_is_no_missing_route(of_p: Behaviour, of_d: Behaviour) -> None:
    async def scene() -> None:
        async with stage(of_p, of_d) as s:
            status, _, body = await s.post({"model": "x"}, "/tokenize")
            assert len(s.d.calls) == len(s.p.calls) == 1
            if of_p is completes:
                assert status == 200, "the other instance has the model"
            else:
                lacks_model = NO_MODEL in (of_p, of_d)
                expected = "The model `x` does not" if lacks_model else "no instance of the fleet"
                assert (status, message(body).startswith(expected)) == (404, True)
            await s.post({"model": "x"}, "/tokenize")
            assert len(s.d.calls) == (2 if of_d is NO_MODEL else 1), "models are not remembered"

    uvloop.run(scene())


def test_another_instance_answers_when_one_is_full_or_fails() -> None:
    async def scene() -> None:
        full, broken = answers(503, "{}"), answers(500, "{}")
        async with stage([], [full, drops_connection, broken, completes], max_retries=2) as s:
            assert (await s.post({"prompt": "a"}, "/tokenize"))[0] == 200
        async with stage(hangs, [broken, broken], max_retries=0) as s:
            assert (await s.post({"prompt": "a"}, "/tokenize"))[0] == 500
            assert sum(len(engine.calls) for engine in s.decoders) == 1
            await assert_idle(s)
        async with stage([], []) as s:
            assert (await s.post({"prompt": "a"}, "/tokenize"))[0] == 503

    uvloop.run(scene())


def test_a_form_with_a_file_passes_byte_for_byte_and_its_stream_as_it_comes() -> None:
    chunks = [b"data: one\n\n", b"data: two\n\n"]

    async def scene() -> None:
        async with stage(prefills, streams(chunks), max_body_bytes=100_000) as s:
            form = aiohttp.FormData({"model": "m"})
            form.add_field("file", bytes(range(256)) * 300, filename="a.wav")
            async with s.session.post(f"{s.url}/v1/audio/transcriptions", data=form) as answer:
                assert (answer.status, await answer.read()) == (200, b"".join(chunks))
            (call,) = s.d.calls
            assert bytes(range(256)) * 300 in call.raw
            assert call.headers["Content-Type"].startswith("multipart/form-data; boundary=")
            form = aiohttp.FormData({"file": "x" * 200_000}, default_to_multipart=True)
            async with s.session.post(f"{s.url}/v1/audio/transcriptions", data=form) as answer:
                assert answer.status == 413
            assert len(s.d.calls) == 1
            await assert_idle(s)

    uvloop.run(scene())


# -- bad input --

ROUTES = ["/v1/responses", "/v1/messages", "/inference/v1/generate", "/tokenize", "/v1/embeddings"]


@pytest.mark.parametrize("path", ROUTES)
def test_malformed_bodies_reach_no_engine_and_leave_nothing(path: str) -> None:
    bodies = (
        b"{",
        b"[1]",
        b'"a"',
        b"\xff\xfe{\x00}\x00",
        b'{"a":' + b"[" * 100_000,
        b'{"a":1}' * 2,
    )

    async def scene() -> None:
        async with stage(prefills, completes, max_body_bytes=1_000_000) as s:
            for body in bodies:
                status, _, text = await s.post(body, path)
                assert status == 400, body[:20]
                assert "not valid JSON" in message(text) or "JSON object" in message(text)
                assert ("type" in json.loads(text)) is (path == "/v1/messages")
            assert (await s.post(b" " * 1_000_001, path))[0] == 413
            assert (s.p.calls, s.d.calls) == ([], [])
            await assert_idle(s)

    uvloop.run(scene())


@pytest.mark.parametrize("path", ROUTES)
def test_a_request_is_cancelled_at_the_engine_when_its_client_disconnects(path: str) -> None:
    async def scene() -> None:
        async with stage(prefills, hangs) as s:
            task = asyncio.create_task(s.post({"stream": True}, path))
            await s.d.entered.wait()
            task.cancel()
            await s.d.cancelled.wait()
            await assert_idle(s)
            is_leg = path in ROUTES[:3]
            assert s.releases.tickets == (["ticket-1"] if is_leg else [])

    uvloop.run(scene())


# -- policy --


def test_a_route_that_administers_an_engine_is_never_forwarded() -> None:
    async def scene() -> None:
        async with stage(completes, completes, forwarded_routes=("/*",)) as s:
            for path in (
                "/sleep",
                "/collective_rpc",
                "/sleep/",
                "/SLEEP",
                "/fault_tolerance/apply",
                "/fault_tolerance",
                "/inference/v1/abort_requests",
            ):
                status, _, text = await s.post({}, path)
                assert status == 403, path
                assert "administers one engine" in message(text)
            for path in ("/%73leep", "//sleep", "/./sleep", "/v1/../sleep"):
                url = URL(s.url + path, encoded=True)
                async with s.session.post(url, json={}) as answer:
                    assert answer.status in (403, 404), path
            assert (s.p.calls, s.d.calls) == ([], [])

    uvloop.run(scene())


def test_a_pattern_opens_no_page_of_the_router() -> None:
    async def scene() -> None:
        async with stage(completes, completes, forwarded_routes=("/*",)) as s:
            for path in ("/admin/instances", LOAD, "/dashboard/requests/x", "/dashboard/state"):
                method = "POST" if path == LOAD else "GET"
                async with s.session.request(method, s.url + path) as answer:
                    assert answer.status == 401, path
            assert (s.p.calls, s.d.calls) == ([], [])

    uvloop.run(scene())


def test_a_path_that_a_pattern_allows_needs_a_key_whatever_its_name() -> None:
    async def scene() -> None:
        async with stage(completes, completes, forwarded_routes=("/*",), api_keys=KEYS) as s:
            for path in ("/admin/x", "/administration", "/dashboardx", f"{LOAD}s"):
                assert (await s.post({}, path))[0] == 401, path
            assert (s.p.calls, s.d.calls) == ([], [])
            assert (await s.post({}, "/administration", X_Api_Key="sk-one"))[0] == 200

    uvloop.run(scene())


def test_an_unknown_route_is_refused_unless_a_pattern_allows_it() -> None:
    async def scene() -> None:
        async with stage(completes, completes, forwarded_routes=("/mine/*",)) as s:
            assert (await s.post({"a": 1}, "/mine/route"))[0] == 200
            assert s.d.calls[0].path == "/mine/route"
            status, _, text = await s.post({"a": 1}, "/other")
            assert (status, message(text)) == (404, "POST /other: Not Found")
            assert len(s.d.calls) == 1

    uvloop.run(scene())


def test_a_pattern_that_can_have_no_effect_is_a_config_error() -> None:
    for pattern in ("v1/mine", "/sleep", "/fault_tolerance/apply"):
        with pytest.raises(ConfigError, match=pattern):
            RoutingOptions(forwarded_routes=(pattern,))


def test_the_table_prefers_a_path_to_a_pattern() -> None:
    table = RouteTable(["/v1/*", "/v1/messages"])
    for path, service in (
        ("/v1/messages", Service.BOTH_LEGS),
        ("/v1/responses/render", Service.ONE_INSTANCE),
        ("/v1/responses/resp_1", Service.STORED_RESPONSE),
        ("/v1/responses/resp_1/cancel", Service.STORED_RESPONSE),
        ("/v1/mine", Service.ONE_INSTANCE),
    ):
        route = table.find(path)
        assert route is not None
        assert route.service is service


# -- access --


def test_keys_are_accepted_in_the_header_of_anthropics_clients() -> None:
    async def scene() -> None:
        async with stage(prefills, completes, api_keys=KEYS) as s:
            assert (await s.post(MESSAGE, "/v1/messages", X_Api_Key="sk-one"))[0] == 200
            status, _, text = await s.post(MESSAGE, "/v1/messages", X_Api_Key="sk-three")
            assert status == 401
            assert json.loads(text)["error"]["type"] == "authentication_error"
            assert "Authorization" not in s.d.calls[0].headers
        async with stage(prefills, completes) as s:
            await s.post(MESSAGE, "/v1/messages", X_Api_Key="sk-of-the-engine")
            assert s.d.calls[0].headers["Authorization"] == "Bearer sk-of-the-engine"

    uvloop.run(scene())


def test_errors_have_the_shape_of_their_api() -> None:
    plain = b'{"error":{"message":"why","type":"BadRequestError","param":null,"code":400}}'
    shaped = shape_error(Api.MESSAGES, 400, plain)
    assert json.loads(shaped) == {
        "type": "error",
        "error": {"type": "invalid_request_error", "message": "why"},
    }
    assert shape_error(Api.MESSAGES, 400, shaped) == shaped
    assert shape_error(Api.RESPONSES, 400, plain) == plain
    assert json.loads(shape_error(Api.MESSAGES, 500, b"oops"))["error"]["message"] == "oops"
    assert error_event(502, "why", Api.MESSAGES).startswith(b"\n\nevent: error\ndata: {")


def test_the_openai_package_reports_a_response_that_breaks_off() -> None:
    async def scene() -> None:
        async with stage(prefills, streams([CREATED, DELTA], then="drop")) as s:

            def act() -> None:
                with OpenAI(base_url=f"{s.url}/v1", api_key="a", max_retries=0) as client:
                    list(client.responses.create(model="m", input="hi", stream=True))

            with pytest.raises(Exception, match="did not complete its answer"):
                await asyncio.to_thread(act)

    uvloop.run(scene())


# -- adapters --

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
ADAPTER = {"lora_name": "a", "lora_path": "/adapters/a"}
ABSENT = answers(404, '{"error":{"message":"The lora adapter \'a\' cannot be found."}}')
LOADED = answers(200, "Success: LoRA adapter 'a' added successfully.", "text/plain")


def test_an_adapter_is_loaded_by_all_instances_for_the_operator_only() -> None:
    async def scene() -> None:
        async with stage([LOADED, LOADED], LOADED, api_keys=KEYS, instance_key="sk-i") as s:
            assert (await s.post(ADAPTER, LOAD, Authorization="Bearer sk-one"))[0] == 401
            status, _, text = await s.post(ADAPTER, LOAD, **AS_ADMIN)
            assert (status, len(json.loads(text)["instances"])) == (200, 3)
            for engine in (*s.prefillers, *s.decoders):
                (call,) = engine.calls
                assert (call.path, call.body) == (LOAD, ADAPTER)
                assert call.headers["Authorization"] == "Bearer sk-i"

    uvloop.run(scene())


def test_the_operator_learns_which_instances_did_not_load_an_adapter() -> None:
    async def scene() -> None:
        full = answers(400, '{"error":{"message":"max_loras is 1"}}')
        async with stage([LOADED, full], drops_connection) as s:
            status, _, text = await s.post(ADAPTER, LOAD, **AS_ADMIN)
            assert status == 502
            assert message(text).startswith("1 of 3 instances loaded the adapter; ")
            assert f"{s.prefillers[1].port}: max_loras is 1" in message(text)
            assert f"{s.d.port}: it closed the connection" in message(text)
            statuses = [entry["status"] for entry in json.loads(text)["instances"]]
            assert sorted(statuses) == [200, 400, 502]
        async with stage(full, full) as s:
            assert (await s.post(ADAPTER, LOAD, **AS_ADMIN))[0] == 400

    uvloop.run(scene())


def test_unloading_an_adapter_that_some_lack_succeeds() -> None:
    async def scene() -> None:
        async with stage(ABSENT, LOADED) as s:
            status, _, text = await s.post(ADAPTER, UNLOAD, **AS_ADMIN)
            assert (status, json.loads(text)["message"][:8]) == (200, "Success:")
            assert (await s.post(ADAPTER, LOAD, **AS_ADMIN))[0] == 502
        async with stage(ABSENT, ABSENT) as s:
            assert (await s.post(ADAPTER, UNLOAD, **AS_ADMIN))[0] == 404

    uvloop.run(scene())


def test_the_router_answers_pings_itself() -> None:
    async def scene() -> None:
        async with stage(hangs, hangs, api_keys=KEYS) as s:
            for method in ("GET", "POST"):
                async with s.session.request(method, f"{s.url}/ping") as answer:
                    assert answer.status == 200

    uvloop.run(scene())
