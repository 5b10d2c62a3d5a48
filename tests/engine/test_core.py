"""Tests the engine as the API process uses it, with real processes and a real tiny model."""

import asyncio
import os
import random
import signal
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import psutil
import pytest

from kvferry.config import KVTransferConfig, SideChannelConfig
from kvferry.config.transfer import KVRole
from kvferry.connectors.contract import ParallelConfig
from kvferry.engine.client import EngineClient
from kvferry.engine.core import _rendezvous_file
from kvferry.engine.make_model.writer import make_model
from kvferry.engine.messages import AddRequest, CoreStatus, RequestOutput, SamplingParams
from kvferry.engine.model.tensor_parallel import join_group
from kvferry.engine.options import EngineOptions
from kvferry.errors import ConfigError, KVFerryError, RemoteProtocolError
from kvferry.testing.local import LocalTransportKit
from kvferry.types import FailurePolicy

T = TypeVar("T")
DEADLINE_S = 100.0

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    make_model(directory)
    return directory


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    with asyncio.Runner() as runner:
        yield runner.get_loop()


@pytest.fixture(scope="module")
def roomy(model: Path, loop: asyncio.AbstractEventLoop) -> Iterator[EngineClient]:
    client = loop.run_until_complete(
        EngineClient.start(EngineOptions(model=model, num_blocks=256), LocalTransportKit())
    )
    yield client
    loop.run_until_complete(client.close())


def do(loop: asyncio.AbstractEventLoop, work: Awaitable[T]) -> T:
    return loop.run_until_complete(asyncio.wait_for(work, DEADLINE_S))


def prompt(seed: int, length: int, stem: int = 0) -> list[int]:
    """Random tokens; the first `stem` tokens are the same for every seed."""
    common = random.Random(0)
    own = random.Random(seed)
    return [common.randrange(1, 500) for _ in range(stem)] + [
        own.randrange(1, 500) for _ in range(length - stem)
    ]


def ask(request_id: str, tokens: list[int], max_tokens: int = 12, **more: Any) -> AddRequest:
    return AddRequest(
        request_id,
        tokens,
        SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
        **more,
    )


async def collect(client: EngineClient, request: AddRequest) -> tuple[list[int], RequestOutput]:
    outputs = [output async for output in client.generate(request)]
    return [token.token_id for output in outputs for token in output.tokens], outputs[-1]


async def tokens_of(client: EngineClient, requests: list[AddRequest]) -> list[list[int]]:
    return [
        tokens
        for tokens, _ in await asyncio.gather(*(collect(client, request) for request in requests))
    ]


async def until(client: EngineClient, is_so: Callable[[CoreStatus], bool]) -> CoreStatus:
    while not is_so(status := await client.status()):
        await asyncio.sleep(0.02)
    return status


def is_quiet(status: CoreStatus) -> bool:
    return not (
        status.num_running
        or status.num_waiting
        or status.num_used_blocks
        or status.num_delayed_frees
    )


def mixed_requests(tag: str) -> list[AddRequest]:
    lengths = [1, 5, 16, 17, 33, 64, 90, 130]
    return [
        ask(f"{tag}-{i}", prompt(i, length, stem=min(20, length - 1)))
        for i, length in enumerate(lengths)
    ]


def children(pid: int) -> list[psutil.Process]:
    """The running descendants of `pid`, except Python's resource tracker, which exits with its
    parent.
    """
    return [process for process in psutil.Process(pid).children(recursive=True) if _counts(process)]


def _counts(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE and "resource_tracker" not in " ".join(
            process.cmdline()
        )
    except psutil.NoSuchProcess:  # the process has ended since, or is about to end
        return False


def newcomers(before: Sequence[psutil.Process]) -> list[psutil.Process]:
    """Our running descendants that are not in `before`."""
    return [process for process in children(os.getpid()) if process not in before]


# -- one engine --


def test_concurrent_requests_get_the_tokens_they_get_alone(
    roomy: EngineClient, loop: asyncio.AbstractEventLoop
) -> None:
    async def story() -> None:
        together = await tokens_of(roomy, mixed_requests("together"))
        alone = [(await collect(roomy, request))[0] for request in mixed_requests("alone")]
        assert together == alone
        assert all(len(tokens) == 12 for tokens in together)
        assert len({tuple(tokens) for tokens in together}) > 4, (
            "different prompts must differ, or equality proves nothing"
        )
        await until(roomy, is_quiet)

    do(loop, story())


def test_a_shared_prefix_is_not_computed_again_and_changes_nothing(
    roomy: EngineClient, loop: asyncio.AbstractEventLoop
) -> None:
    async def story() -> None:
        tokens = prompt(77, 50)
        first, _ = await collect(roomy, ask("cold", tokens))
        second, last = await collect(roomy, ask("warm", tokens))
        assert first == second
        assert last.num_cached_tokens == 48
        salted, last = await collect(roomy, ask("salted", tokens, cache_salt="tenant"))
        assert (salted, last.num_cached_tokens) == (first, 0)

    do(loop, story())


def test_requests_added_together_share_a_step(
    roomy: EngineClient, loop: asyncio.AbstractEventLoop
) -> None:
    async def story() -> None:
        streams = roomy.add([ask(f"n-{i}", prompt(5, 20), draw_seed=i) for i in range(3)])
        results = [
            [token.token_id async for output in stream for token in output.tokens]
            for stream in streams
        ]
        assert results[0] == results[1] == results[2]

    do(loop, story())


def test_leaving_the_iteration_early_frees_the_blocks(
    roomy: EngineClient, loop: asyncio.AbstractEventLoop
) -> None:
    async def story() -> None:
        before = (await roomy.status()).requests_finished_by_reason["abort"]
        stream = roomy.generate(ask("left", prompt(9, 40), max_tokens=2000))
        async for _ in stream:
            break
        await stream.aclose()
        task = asyncio.create_task(collect(roomy, ask("cancelled", prompt(9, 40), max_tokens=2000)))
        await until(roomy, lambda status: status.num_running > 0)
        task.cancel()
        status = await until(roomy, is_quiet)
        assert status.requests_finished_by_reason["abort"] == before + 2

    do(loop, story())


def test_an_abort_by_id_ends_the_stream(
    roomy: EngineClient, loop: asyncio.AbstractEventLoop
) -> None:
    async def story() -> None:
        (stream,) = roomy.add([ask("stopped", prompt(9, 40), max_tokens=2000)])
        roomy.abort("stopped")
        roomy.abort("stranger")
        assert [output.finish_reason async for output in stream][-1] == "abort"
        await until(roomy, is_quiet)

    do(loop, story())


def test_closing_an_old_stream_does_not_end_a_new_request_of_the_same_id(
    roomy: EngineClient, loop: asyncio.AbstractEventLoop
) -> None:
    async def story() -> None:
        (old,) = roomy.add([ask("again", prompt(3, 10), max_tokens=1)])
        assert [output.finish_reason async for output in old] == ["length"]
        (new,) = roomy.add([ask("again", prompt(3, 10), max_tokens=5)])
        old.close()
        assert [output.finish_reason async for output in new][-1] == "length"

    do(loop, story())


def test_what_cannot_be_sent_is_refused_and_the_engine_goes_on(
    roomy: EngineClient, loop: asyncio.AbstractEventLoop
) -> None:
    async def story() -> None:
        nested: list[Any] = []
        for _ in range(100_000):
            nested = [nested]
        for params in ({"big": 2**70}, {"lone": "\ud800"}, {"deep": nested}):
            with pytest.raises(RemoteProtocolError):
                roomy.add([ask("bad", [1], kv_transfer_params=params)])
        (stream,) = roomy.add([ask("twice", prompt(1, 5), max_tokens=50)])
        with pytest.raises(RemoteProtocolError):
            roomy.add([ask("twice", [1])])
        assert [output.finish_reason async for output in stream][-1] == "length"
        _, refused = await collect(roomy, ask("long", [1] * 5000))
        assert (refused.finish_reason, refused.error_status) == ("error", 400)
        await until(roomy, is_quiet)

    do(loop, story())


def test_few_blocks_give_the_same_tokens_as_many(
    roomy: EngineClient, model: Path, loop: asyncio.AbstractEventLoop
) -> None:
    async def story() -> None:
        requests = [ask(f"tight-{i}", prompt(i, 30, stem=10), max_tokens=60) for i in range(6)]
        expected = await tokens_of(roomy, requests)
        options = EngineOptions(
            model=model, num_blocks=12, max_num_batched_tokens=24, block_size=16
        )
        tight = await EngineClient.start(options, LocalTransportKit())
        try:
            assert await tokens_of(tight, requests) == expected
            status = await until(tight, is_quiet)
            assert status.preemptions_total > 0
        finally:
            await tight.close()

    do(loop, story())


# -- several ranks --


def test_two_ranks_equal_one_and_the_death_of_one_ends_the_engine(
    roomy: EngineClient, model: Path, loop: asyncio.AbstractEventLoop
) -> None:
    async def story() -> None:
        options = EngineOptions(model=model, num_blocks=256, tensor_parallel_size=2)
        pair = await EngineClient.start(options, LocalTransportKit())
        assert pair.pid is not None
        core, ranks = psutil.Process(pair.pid), children(pair.pid)
        try:
            assert await tokens_of(pair, mixed_requests("two")) == await tokens_of(
                roomy, mixed_requests("one")
            )
            (stream,) = pair.add([ask("cut", prompt(1, 20), max_tokens=3000)])
            assert (await anext(stream)).finish_reason is None
            assert len(ranks) == 1
            os.kill(ranks[0].pid, signal.SIGKILL)
            last = [output async for output in stream][-1]
            assert last.finish_reason == "error"
            assert "rank 1" in (last.error or "")
            assert "rank 1" in await pair.died()
            assert not pair.is_alive
            with pytest.raises(KVFerryError):
                await pair.status()
            assert (await collect(pair, ask("late", [1])))[1].finish_reason == "error"
        finally:
            await pair.close()
        assert psutil.wait_procs([core, *ranks], timeout=60)[1] == []

    do(loop, story())


def copying(model: Path, policy: FailurePolicy, **more: Any) -> EngineOptions:
    transfer = KVTransferConfig(
        kv_connector="CopyConnector",
        kv_role=KVRole.BOTH,
        kv_connector_module_path="tests.engine.copy_connector",
        kv_load_failure_policy=policy,
    )
    return EngineOptions(
        model=model, num_blocks=64, enable_prefix_caching=False, kv_transfer=transfer, **more
    )


async def copied(
    client: EngineClient, tag: str, how: str
) -> tuple[list[int], list[int], RequestOutput]:
    """The tokens of a request that computed its KV, then the tokens and the last output of a
    request that loaded the KV through the connector.
    """
    tokens = prompt(31, 45)
    first, kept = await collect(
        client, ask(f"{tag}-first", tokens, kv_transfer_params={"keep": True})
    )
    assert kept.kv_transfer_params == {"blocks": 4}
    assert (await client.status()).num_delayed_frees == 1
    params = {"copy_of": f"{tag}-first", "how": how}
    second, last = await collect(client, ask(f"{tag}-second", tokens, kv_transfer_params=params))
    return first, second, last


def test_loads_between_steps_bring_right_tokens_and_wake_the_engine(
    model: Path, loop: asyncio.AbstractEventLoop
) -> None:
    async def story() -> None:
        options = copying(model, FailurePolicy.RECOMPUTE, tensor_parallel_size=2)
        client = await EngineClient.start(
            options, LocalTransportKit(), side_channel=SideChannelConfig()
        )
        assert client.pid is not None
        processes = [psutil.Process(client.pid), *children(client.pid)]
        try:
            first, second, last = await copied(client, "plain", "")
            assert (first, last.num_cached_tokens) == (second, 44)
            first, second, last = await copied(client, "spoilt", "corrupt")
            assert first != second, "one spoilt block must show, or equality proves nothing"
            first, second, last = await copied(client, "failed", "fail")
            assert (first, last.num_cached_tokens) == (second, 0)
            status = await until(client, is_quiet)
            # Each request needs one step per token and a few steps for connector news; a core that
            # spins would take thousands of steps.
            assert status.connector_stats["worker_steps"] < 2 * 6 * 30
            os.kill(client.pid, signal.SIGKILL)
            assert "signal 9" in await client.died()
            assert psutil.wait_procs(processes, timeout=60)[1] == [], "ranks outlive a killed core"
        finally:
            await client.close()

    do(loop, story())


def test_a_failed_load_ends_in_an_error_that_says_why_and_closing_leaves_nothing(
    model: Path, loop: asyncio.AbstractEventLoop
) -> None:
    async def story() -> None:
        before = children(os.getpid())
        client = await EngineClient.start(
            copying(model, FailurePolicy.FAIL),
            LocalTransportKit(),
            side_channel=SideChannelConfig(),
        )
        try:
            _, tokens, last = await copied(client, "failed", "fail")
            assert (tokens, last.finish_reason, last.error_status) == ([], "error", 502)
            assert "told to fail" in (last.error or "")
            await until(client, is_quiet)
            (stream,) = client.add([ask("open", prompt(1, 30), max_tokens=900)])
            await anext(stream)
        finally:
            await client.close()
            await client.close()
        assert [output.finish_reason async for output in stream][-1] == "error"
        assert "exited with code 0" in await client.died()
        assert newcomers(before) == []

    do(loop, story())


# -- starting and stopping --


def test_a_start_that_is_cancelled_leaves_no_process_and_no_complaint(
    model: Path,
    loop: asyncio.AbstractEventLoop,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    async def story() -> None:
        before = children(os.getpid())
        for stage in (None, "loading the model", "allocating the KV cache"):
            reached = asyncio.Event()

            def heard(
                said: str, waited: str | None = stage, reached: asyncio.Event = reached
            ) -> None:
                if said == waited:
                    reached.set()

            starting = asyncio.create_task(
                EngineClient.start(
                    EngineOptions(model=model), LocalTransportKit(), on_progress=heard
                )
            )
            await (asyncio.sleep(0) if stage is None else reached.wait())
            starting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await starting
            assert newcomers(before) == [], stage

    do(loop, story())
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == []
    assert "Traceback" not in (said := capfd.readouterr().err)
    assert "API process is gone" not in said


def test_ctrl_c_does_not_reach_a_core_that_is_being_born(
    model: Path, loop: asyncio.AbstractEventLoop
) -> None:
    async def story() -> None:
        before = children(os.getpid())
        starting = asyncio.create_task(
            EngineClient.start(EngineOptions(model=model, num_blocks=8), LocalTransportKit())
        )
        while not (born := newcomers(before)):
            await asyncio.sleep(0)
        for process in born:
            os.kill(process.pid, signal.SIGINT)
        client = await starting
        await client.close()

    do(loop, story())


def test_a_core_that_has_said_that_it_serves_is_not_ended_by_sigterm(
    model: Path, loop: asyncio.AbstractEventLoop
) -> None:
    async def story() -> None:
        before = children(os.getpid())
        client = await EngineClient.start(
            EngineOptions(model=model, num_blocks=8), LocalTransportKit()
        )
        for process in children(os.getpid()):
            if process not in before:
                os.kill(process.pid, signal.SIGTERM)
        tokens, _ = await collect(client, ask("after", prompt(1, 20), max_tokens=3))
        assert len(tokens) == 3
        await client.close()

    do(loop, story())


def test_ranks_meet_at_a_place_that_nobody_has_to_clean_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with _rendezvous_file() as rendezvous, ThreadPoolExecutor(3) as pool:
        joining = [
            pool.submit(join_group, ParallelConfig(3, rank), rendezvous, DEADLINE_S)
            for rank in range(3)
        ]
        groups = [future.result(DEADLINE_S) for future in joining]
        path = Path(urlsplit(rendezvous).path)
        assert path.stat().st_size > 0, "they have met here"
        assert list(tmp_path.iterdir()) == []
    assert not path.exists()
    for group in groups:
        group.close()


def test_a_start_that_cannot_work_says_why_and_leaves_no_process(
    model: Path,
    tmp_path: Path,
    loop: asyncio.AbstractEventLoop,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    async def story() -> None:
        before = children(os.getpid())
        stages: list[str] = []
        with pytest.raises(ConfigError):
            await EngineClient.start(
                EngineOptions(model=tmp_path / "nothing"),
                LocalTransportKit(),
                on_progress=stages.append,
            )
        assert stages == ["loading the model"]
        assert "nothing" not in capfd.readouterr().err, (
            "it is said once, by whoever catches the error"
        )
        assert [
            record.getMessage() for record in caplog.records if record.levelname == "WARNING"
        ] == []
        with pytest.raises(ConfigError, match="--tensor-parallel-size"):
            await EngineClient.start(
                EngineOptions(model=model, tensor_parallel_size=3), LocalTransportKit()
            )
        with pytest.raises(KVFerryError, match="not ready within"):
            await EngineClient.start(
                EngineOptions(model=model), LocalTransportKit(), timeout_s=0.01
            )
        assert newcomers(before) == []

    do(loop, story())
