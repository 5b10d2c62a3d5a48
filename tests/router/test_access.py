"""Tests access control (API keys, tenants, the admin key, requests from other sites' pages, TLS)
and trace headers.
"""

import asyncio
import json
import ssl
import subprocess
from pathlib import Path
from typing import Any

import pytest
import uvloop
from tests.router.stubs import AS_ADMIN, completes, prefills, stage
from tests.router.test_proxy import ONE, message

from kvferry.cli.main import main
from kvferry.errors import ConfigError
from kvferry.router.access import tenant_without_keys
from kvferry.router.options import AccessOptions, RouterOptions
from kvferry.router.server import server_tls
from kvferry.web.api_keys import ApiKeys, read_key_file

KEYS = (("one", "sk-one"), ("two", "sk-two"))


def test_only_those_with_a_key_are_served() -> None:
    async def scene() -> None:
        async with stage(prefills, completes, api_keys=KEYS) as s:
            for sent in (
                {},
                {"Authorization": "Bearer sk-three"},
                {"Authorization": "sk-one"},
                {"Authorization": "Basic sk-one"},
            ):
                status, headers, body = await s.post(ONE, **sent)
                assert (status, headers["WWW-Authenticate"], message(body)) == (
                    401,
                    "Bearer",
                    "the API key is missing or unknown",
                )
            assert s.p.calls == []
            assert (await s.post(ONE, Authorization="Bearer sk-one"))[0] == 200
            assert (await s.post(ONE, Authorization="bearer  sk-two"))[0] == 200

    uvloop.run(scene())


def test_a_client_without_a_key_does_not_get_to_upload_anything() -> None:
    async def scene() -> None:
        async with stage(prefills, completes, api_keys=KEYS) as s:
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", int(s.url.rsplit(":", 1)[1])
            )
            writer.write(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n"
            )
            assert (await reader.readline()).startswith(b"HTTP/1.1 401")
            writer.close()

    uvloop.run(scene())


def test_the_routers_keys_are_not_shown_to_instances() -> None:
    async def scene() -> None:
        async with stage(prefills, completes, api_keys=KEYS) as s:
            await s.post(ONE, Authorization="Bearer sk-one")
            assert ["Authorization" in engine.calls[0].headers for engine in (s.p, s.d)] == [
                False,
                False,
            ]
        async with stage(prefills, completes, api_keys=KEYS, instance_key="sk-inside") as s:
            await s.post(ONE, Authorization="Bearer sk-one")
            assert [engine.calls[0].headers["Authorization"] for engine in (s.p, s.d)] == [
                "Bearer sk-inside"
            ] * 2

    uvloop.run(scene())


def test_the_routers_keys_are_not_shown_to_instances_that_are_asked_for_their_models() -> None:
    async def seen(sent: str, **settings: Any) -> str | None:
        async with stage(prefills, completes, **settings) as s:
            async with s.session.get(
                f"{s.url}/v1/models", headers={"Authorization": sent}
            ) as answer:
                assert answer.status == 200
            return s.d.calls[0].headers.get("Authorization")

    async def scene() -> None:
        assert await seen("Bearer sk-one", api_keys=KEYS) is None
        assert (
            await seen("Bearer sk-one", api_keys=KEYS, instance_key="sk-inside")
            == "Bearer sk-inside"
        )
        assert await seen("Bearer sk-engine") == "Bearer sk-engine", (
            "without keys of ours it is the engine's"
        )

    uvloop.run(scene())


@pytest.mark.parametrize("path", ["/health", "/healthz", "/readyz"])
def test_probes_need_no_key_but_only_those_with_a_key_see_counts(path: str) -> None:
    async def scene() -> None:
        async with stage(prefills, completes, api_keys=KEYS) as s:
            for sent, sees_counts in (
                ({}, False),
                ({"Authorization": "Bearer sk-three"}, False),
                ({"Authorization": "Bearer sk-one"}, True),
                (AS_ADMIN, True),
            ):
                async with s.session.get(s.url + path, headers=sent) as answer:
                    assert answer.status == 200
                    assert (set(await answer.json()) != {"status"}) is sees_counts

    uvloop.run(scene())


def test_metrics_need_a_key_where_the_router_has_keys() -> None:
    async def scene() -> None:
        async with stage(prefills, completes, api_keys=KEYS) as s:
            for sent, status in (
                ({}, 401),
                ({"Authorization": "Bearer sk-three"}, 401),
                ({"Authorization": "Bearer sk-one"}, 200),
                (AS_ADMIN, 200),
            ):
                async with s.session.get(f"{s.url}/metrics", headers=sent) as answer:
                    assert answer.status == status
        async with (
            stage(prefills, completes) as s,
            s.session.get(f"{s.url}/metrics") as answer,
        ):
            assert answer.status == 200

    uvloop.run(scene())


@pytest.mark.parametrize("flag", ["--api-key-file", "--admin-key-file", "--instance-key-file"])
def test_a_key_file_that_all_users_can_read_is_refused(
    flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "key"
    path.write_text("sk-one")
    path.chmod(0o604)
    assert main(["proxy", flag, str(path)]) == 2
    assert f"run `chmod 600 {path}`" in capsys.readouterr().err


@pytest.mark.parametrize("path", ["/admin/instances", "/dashboard/state", "/dashboard/requests/x"])
def test_the_admins_pages_need_the_admins_key(path: str) -> None:
    async def scene() -> None:
        async with stage(prefills, completes, admin_key="sk-admin", api_keys=KEYS) as s:
            for sent, is_in in (
                ({}, False),
                ({"Authorization": "Bearer sk-one"}, False),
                ({"Authorization": "Bearer sk-admin"}, True),
            ):
                async with s.session.get(s.url + path, headers=sent) as answer:
                    assert (answer.status != 401) is is_in

    uvloop.run(scene())


def test_a_router_without_an_admin_key_lets_no_admin_in_not_even_from_its_own_machine() -> None:
    """A reverse proxy on the router's machine sends what a local client sends."""

    async def scene() -> None:
        async with stage(prefills, completes, admin_key="") as s:
            order = {"role": "decode", "url": f"http://127.0.0.1:{s.d.port}"}
            for sent in ({}, {"Authorization": "Bearer "}, {"Authorization": "Bearer x"}):
                for method, path in (
                    ("GET", "/admin/instances"),
                    ("POST", "/admin/instances"),
                    ("POST", "/admin/instances/drain"),
                    ("DELETE", "/admin/instances"),
                    ("GET", "/dashboard/state"),
                ):
                    async with s.session.request(
                        method, s.url + path, json=order, headers=sent
                    ) as answer:
                        assert (answer.status, path) == (401, path)
            assert (await s.post(ONE))[0] == 200, "D is still in the fleet"

    uvloop.run(scene())


# -- tenants --


def test_keys_are_read_from_lines() -> None:
    pairs = read_key_file("# ours\nteam-a sk-1\nteam-a sk-2  # two keys\n\nsk-3\n")
    keys = ApiKeys.of(pairs)
    assert (keys.find("Bearer sk-1"), keys.find("Bearer sk-2")) == ("team-a", "team-a")
    assert keys.find("Bearer sk-3") not in (None, "team-a")
    assert keys.find("Bearer sk-4") is None


@pytest.mark.parametrize("text", ["a b c", "team-a sk-1\nteam-b sk-1"])
def test_a_key_file_that_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        ApiKeys.of(read_key_file(text))


def test_where_the_router_has_no_keys_clients_are_told_apart_by_credentials_or_address() -> None:
    pairs = [(None, "::1"), (None, "10.0.0.1"), ("Bearer a", "::1"), ("Bearer b", "::1")]
    assert len({tenant_without_keys(*pair) for pair in pairs}) == 4
    assert tenant_without_keys("Bearer a", "::1") == tenant_without_keys("Bearer a", "10.0.0.1")


# -- browsers --


def test_pages_of_allowed_origins_may_read_answers_and_others_may_not() -> None:
    async def scene() -> None:
        async with stage(prefills, completes, cors_origins=("https://app.example",)) as s:
            for origin, is_allowed in (
                ("https://app.example", True),
                ("https://evil.example", False),
            ):
                _, headers, _ = await s.post(ONE, Origin=origin)
                assert (headers.get("Access-Control-Allow-Origin") == origin) is is_allowed
                asked = {
                    "Origin": origin,
                    "Access-Control-Request-Method": "POST",
                    "Access-Control-Request-Headers": "authorization",
                }
                async with s.session.options(f"{s.url}/v1/completions", headers=asked) as answer:
                    assert answer.status == 204
                    assert (
                        "POST" in answer.headers.get("Access-Control-Allow-Methods", "")
                    ) is is_allowed
            assert "Access-Control-Allow-Origin" not in (await s.post(ONE))[1]

    uvloop.run(scene())


def test_a_preflight_needs_no_key() -> None:
    """Browsers send no key with a preflight request."""

    async def scene() -> None:
        async with stage(prefills, completes, cors_origins=("*",), api_keys=KEYS) as s:
            asked = {"Origin": "https://app.example", "Access-Control-Request-Method": "POST"}
            async with s.session.options(f"{s.url}/v1/chat/completions", headers=asked) as answer:
                assert (answer.status, answer.headers["Access-Control-Allow-Origin"]) == (204, "*")

    uvloop.run(scene())


# -- TLS --


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("tls")
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-days",
        "2",
        *names,
    ]
    subprocess.run(
        [*command, "-keyout", folder / "key.pem", "-out", folder / "cert.pem"],
        check=True,
        capture_output=True,
    )
    return folder / "cert.pem", folder / "key.pem"


def test_the_router_serves_tls(certificate: tuple[Path, Path]) -> None:
    async def scene() -> None:
        cert, key = certificate
        async with stage(prefills, completes, ssl_certfile=str(cert), ssl_keyfile=str(key)) as s:
            trusting = ssl.create_default_context(cafile=cert)
            url = s.url.replace("http://", "https://") + "/v1/completions"
            async with s.session.post(url, json=ONE, ssl=trusting) as answer:
                body: Any = await answer.json()
                assert (answer.status, body["choices"]) == (200, [{"text": "hello"}])
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", int(s.url.rsplit(":", 1)[1])
            )
            writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b"200" not in await reader.read(100)
            writer.close()

    uvloop.run(scene())


def test_a_key_of_a_certificate_that_all_users_can_read_is_refused(
    certificate: tuple[Path, Path], tmp_path: Path
) -> None:
    cert, key = certificate
    public = tmp_path / "key.pem"
    public.write_bytes(key.read_bytes())
    public.chmod(0o644)
    with pytest.raises(ConfigError, match="run `chmod 600"):
        server_tls(
            RouterOptions(access=AccessOptions(ssl_certfile=str(cert), ssl_keyfile=str(public)))
        )


def test_a_certificate_that_cannot_be_read_is_an_error_of_the_operator(tmp_path: Path) -> None:
    async def scene() -> None:
        async with stage(prefills, completes, ssl_certfile=str(tmp_path / "none.pem")):
            pass

    with pytest.raises(ConfigError, match=r"none\.pem"):
        uvloop.run(scene())


# -- traces --


def test_trace_context_reaches_both_legs() -> None:
    async def scene() -> None:
        async with stage(prefills, completes) as s:
            trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
            await s.post(ONE, traceparent=trace, tracestate="a=1", baggage="k=v")
            for engine in (s.p, s.d):
                headers = engine.calls[0].headers
                assert [headers[name] for name in ("traceparent", "tracestate", "baggage")] == [
                    trace,
                    "a=1",
                    "k=v",
                ]
            assert json.loads(s.d.calls[0].raw)["prompt"] == "hello"

    uvloop.run(scene())


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/v1/completions", 401),
        ("GET", "/v1/completions", 405),
        ("GET", "/nowhere", 404),
        ("GET", "/healthz", 200),
        ("GET", "/dashboard/state", 401),
        ("OPTIONS", "/v1/completions", 204),
    ],
)
def test_every_answer_to_a_request_has_its_id(method: str, path: str, status: int) -> None:
    """A refusal also carries the id, because users ask the operator about refusals."""

    async def scene() -> None:
        async with stage(
            prefills, completes, api_keys=KEYS, admin_key="sk-admin", cors_origins=("https://app",)
        ) as s:
            sent = {"Origin": "https://app", "Access-Control-Request-Method": "POST"}
            for given, expected in (
                ({"X-Request-Id": "mine-1"}, "mine-1"),
                ({}, None),
                ({"X-Request-Id": "un fit"}, None),
            ):
                async with s.session.request(method, s.url + path, headers=sent | given) as answer:
                    assert answer.status == status
                    assert answer.headers["X-Request-Id"] == expected or (
                        expected is None and len(answer.headers["X-Request-Id"]) == 32
                    )

    uvloop.run(scene())


@pytest.mark.parametrize("head", ["Content-Length: 67108864", "Transfer-Encoding: chunked"])
@pytest.mark.parametrize("line", ["GET /healthz", "GET /metrics", "POST /admin/register"])
def test_what_is_open_to_everybody_takes_no_large_bodies(line: str, head: str) -> None:
    """A client without a key could otherwise fill the router's memory."""

    async def scene() -> None:
        async with stage(prefills, completes, api_keys=KEYS) as s:
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", int(s.url.rsplit(":", 1)[1])
            )
            writer.write(f"{line} HTTP/1.1\r\nHost: x\r\n{head}\r\n\r\n".encode())
            assert (await reader.readline()).startswith(b"HTTP/1.1 413")
            writer.close()
            async with s.session.get(f"{s.url}/healthz", data=b"x" * 1000) as answer:
                assert answer.status == 200

    uvloop.run(scene())
