"""Tests the router benchmark with real processes: it verifies every answer and detects a router
that answers wrongly. No time is asserted.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvferry.bench.router.contestants import Tools, default_router_python, missing_packages
from kvferry.bench.router.messages import EVENTS, BenchMessages, PrefillLedger
from kvferry.bench.router.report import Router, RouterCell, Sample, make_rows, table
from kvferry.errors import ConfigError

ROOT = Path(__file__).parents[2]
TALK = BenchMessages(1000)

# A router with the flags of vLLM's toy proxy. It handles every third request wrongly, in the way
# that `WRONG` names.
WRONG_ROUTER = """
import argparse, itertools, json
import aiohttp
from aiohttp import web

parser = argparse.ArgumentParser()
for flag in ("--host", "--port", "--prefiller-hosts", "--prefiller-ports", "--decoder-hosts", "--decoder-ports"):
    parser.add_argument(flag)
given = parser.parse_args()
prefill = f"http://{given.prefiller_hosts}:{given.prefiller_ports}/v1/completions"
decode = f"http://{given.decoder_hosts}:{given.decoder_ports}/v1/completions"
count = itertools.count(1)
kept = {}

async def forward(request):
    body = await request.json()
    is_wrong = next(count) % 3 == 0
    async with aiohttp.ClientSession() as session:
        leg = body | {"stream": False, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": not (is_wrong and WRONG == "not asked")}}
        async with session.post(prefill, json=leg) as answer:
            if answer.status != 200:
                return web.Response(status=answer.status, body=await answer.read(), content_type="application/json")
            params = (await answer.json())["kv_transfer_params"]
        if is_wrong and WRONG == "another's":
            params = kept["params"]
        if is_wrong and WRONG == "changed":
            params["remote_num_tokens"] += 1
        kept["params"] = params
        if not (is_wrong and WRONG == "forgotten"):
            body["kv_transfer_params"] = params
        async with session.post(decode, json=body) as answer:
            events = await answer.read()
            if is_wrong and WRONG == "dropped":
                events = events[events.index(b"\\n\\n") + 2:]
            if is_wrong and WRONG == "cut":
                request.transport.abort()
            return web.Response(status=answer.status, body=events, content_type=answer.content_type)

app = web.Application()
app.add_routes([web.post("/v1/completions", forward)])
web.run_app(app, host=given.host, port=int(given.port), print=None)
"""  # noqa: E501


def bench(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "kvferry",
        "bench",
        "router",
        "--json",
        "--repeats",
        "1",
        *flags,
    ]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)


def rows_of(ran: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    assert ran.stdout, ran.stderr
    rows: list[dict[str, Any]] = json.loads(ran.stdout)["rows"]
    return rows


@pytest.mark.slow
@pytest.mark.parametrize("writes", [1, EVENTS])
def test_every_request_through_our_router_is_verified(writes: int) -> None:
    flags = [
        "--routers",
        "direct",
        "kvferry",
        "--requests",
        "30",
        "--concurrency",
        "1",
        "8",
        "--prompt-bytes",
        "100",
        "200k",
    ]
    ran = bench(*flags, "--writes", str(writes))
    rows = rows_of(ran)
    assert ran.returncode == 0
    where = [(row["prompt_bytes"], row["concurrency"], row["router"]) for row in rows]
    assert where == [
        (size, count, router)
        for size in (100, 200_000)
        for count in (1, 8)
        for router in ("direct", "kvferry")
    ]
    assert {(row["requests"], row["failed"]) for row in rows} == {(30, 0)}
    assert all(row["rps"] > 0 and row["ttfb_p50_ms"] > 0 and row["of_direct"] > 0 for row in rows)
    assert [row["cpu_s_per_1k"] is None for row in rows] == [True, False] * 4


@pytest.mark.slow
@pytest.mark.parametrize("router", [Router.AIOHTTP, Router.TOY, Router.VLLM_ROUTER])
def test_every_request_through_the_other_routers_is_verified(router: Router) -> None:
    tools = Tools(ROOT / ".venv-router" / "bin" / "python")
    if router is Router.AIOHTTP:
        tools = Tools(Path(sys.executable))
    elif not tools.python.exists() or missing_packages(router, tools):
        pytest.skip("its packages are not installed here; make setup-vllm does it")
    flags = ["--requests", "30", "--concurrency", "1", "8", "--prompt-bytes", "1k", "64K"]
    ran = bench("--routers", router, *flags, "--router-python", str(tools.python))
    rows = rows_of(ran)
    assert ran.returncode == 0
    assert [(row["router"], row["requests"], row["failed"]) for row in rows] == [
        (router, 30, 0)
    ] * 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ("nothing", None),
        ("forgotten", "status 400: D did not get P's parameters"),
        ("another's", "status 400: D got parameters that P did not write for this request"),
        ("changed", "status 400: D got parameters other than P wrote"),
        ("not asked", "status 400: P was not asked to keep its blocks"),
        ("dropped", f"the stream is not what D sent ({EVENTS} of {EVENTS + 1} events)"),
        ("cut", "the connection was closed before the answer was whole"),
    ],
)
def test_a_router_that_is_wrong_now_and_then_is_seen(
    wrong: str, why: str | None, tmp_path: Path
) -> None:
    program = tmp_path / "wrong_router.py"
    program.write_text(f"WRONG = {wrong!r}\n{WRONG_ROUTER}")
    flags = ["--routers", "toy", "--requests", "20", "--concurrency", "1", "--prompt-bytes", "1k"]
    ran = bench(*flags, "--toy-proxy", str(program), "--router-python", sys.executable)
    (row,) = rows_of(ran)
    # The benchmark sends one request to see that the router has started and four to warm up. The
    # router handles the third request wrongly, and every third one after it.
    expected = {} if why is None else {why: 8}
    assert row["failures"] == expected
    assert (row["failed"], row["requests"], ran.returncode) == (
        (0, 20, 0) if why is None else (8, 13, 1)
    )


def test_d_wants_the_parameters_of_its_own_request_and_each_once() -> None:
    ledger = PrefillLedger(TALK)
    first, second = (
        answer.partition(b"\r\n\r\n")[2] for answer in (ledger.next_answer(), ledger.next_answer())
    )
    assert first != second
    assert ledger.decode_mismatch(TALK.decode_body(second)) is None
    assert ledger.decode_mismatch(TALK.decode_body(first)) is None
    assert (
        ledger.decode_mismatch(TALK.decode_body(first))
        == "D got parameters that P did not write for this request"
    )
    assert ledger.decode_mismatch(TALK.request_body) == "D did not get P's parameters"
    assert ledger.decode_mismatch(b'{"prompt":""}') == "D did not get the prompt"


def test_parameters_are_found_wherever_a_router_puts_them() -> None:
    ledger = PrefillLedger(BenchMessages(100_000))
    for place in ("first", "last", "between"):
        params = json.loads(ledger.next_answer().partition(b"\r\n\r\n")[2])["kv_transfer_params"]
        fields = json.loads(ledger.messages.request_body)
        parts = {
            "first": [{"kv_transfer_params": params}, fields],
            "last": [fields, {"kv_transfer_params": params}],
        }
        parts["between"] = [fields, {"kv_transfer_params": params}, {"user": "x" * 100_000}]
        body = json.dumps(
            {key: value for part in parts[place] for key, value in part.items()}, indent=1
        ).encode()
        assert ledger.decode_mismatch(body) is None, place


@pytest.mark.parametrize("size", [1, 100, 1024, 65536])
def test_a_prompt_is_as_long_as_it_was_asked_for(size: int) -> None:
    empty = len(
        json.dumps(
            {**json.loads(BenchMessages(size).request_body), "prompt": ""}, separators=(",", ":")
        )
    )
    assert len(BenchMessages(size).request_body) - empty == size


def sample(
    rps: float, ttfb_ms: float, failures: dict[str, int] | None = None, cpu: float | None = None
) -> Sample:
    return Sample(rps, ttfb_ms, 2 * ttfb_ms, 0.5, 0.0, 10, failures or {}, cpu)


def test_a_row_tells_medians_and_what_a_router_adds() -> None:
    cell = RouterCell(1024, 16)
    cell.samples = {
        Router.DIRECT: [sample(1000, 1.0)] * 3,
        Router.KVFERRY: [
            sample(100, 9.0, cpu=3.0),
            sample(500, 3.0, cpu=0.5),
            sample(600, 2.0, {"lost": 2}, cpu=0.4),
        ],
        Router.TOY: [sample(50, 30.0, cpu=9.0)],
    }
    direct, ours, toy = make_rows([cell])
    assert (ours["rps"], ours["rps_min"], ours["rps_max"], ours["of_direct"], ours["of_toy"]) == (
        500,
        100,
        600,
        0.5,
        10.0,
    )
    assert (
        ours["ttfb_p50_ms"],
        ours["added_p50_ms"],
        ours["added_p99_ms"],
        ours["cpu_s_per_1k"],
    ) == (3.0, 2.0, 4.0, 0.5)
    assert (ours["requests"], ours["failed"], ours["failures"]) == (30, 2, {"lost": 2})
    assert (direct["added_p50_ms"], direct["cpu_s_per_1k"], toy["of_vllm_router"]) == (
        None,
        None,
        None,
    )
    told = table(
        [direct, ours, toy], {"repeats": 3, "seconds": 2.0, "requests": None, "skipped": {}}
    )
    assert "2 × lost" in told


def test_a_router_whose_packages_are_missing_is_left_out_with_the_fix(tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S -I "$@"\n')
    bare.chmod(0o755)
    assert missing_packages(Router.KVFERRY, Tools(bare)) is None
    for router, package in ((Router.TOY, "fastapi"), (Router.VLLM_ROUTER, "vllm_router")):
        note = missing_packages(router, Tools(bare))
        assert note is not None
        assert package in note
        assert "make setup-vllm" in note
    ran = bench(
        "--routers",
        "toy",
        "direct",
        "--requests",
        "2",
        "--concurrency",
        "1",
        "--prompt-bytes",
        "10",
        "--router-python",
        str(bare),
    )
    assert [row["router"] for row in rows_of(ran)] == ["direct"]
    assert "left out: toy needs fastapi" in ran.stderr
    assert "fastapi" in json.loads(ran.stdout)["machine"]["skipped"]["toy"]


def test_what_cannot_be_measured_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be run"):
        missing_packages(Router.TOY, Tools(tmp_path / "nothing"))
    with pytest.raises(ConfigError, match="is no file"):
        missing_packages(Router.TOY, Tools(Path(sys.executable), tmp_path / "nothing.py"))
    for flags, why in (
        (["--concurrency", "0"], "--concurrency must be a number like"),
        (["--seconds", "nan"], "--seconds must be a number of seconds above 0"),
        (["--writes", "17"], "--writes must be a whole number from 1 to 16"),
    ):
        ran = bench("--routers", "direct", *flags)
        assert ran.returncode == 2
        assert why in ran.stderr


def test_the_environment_beside_us_is_preferred(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert default_router_python() == Path(sys.executable)
    python = tmp_path / ".venv-router" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    assert default_router_python() == python
