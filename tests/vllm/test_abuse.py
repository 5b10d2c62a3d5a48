"""Tests what clients, forgers, port scanners and dying peers can do to real vLLM with kvferry
inside: no engine dies, no block leaks, no token is wrong.

Each test runs inside `unharmed`: the engines keep their processes, their blocks become free, and
the next good request is right. A request that takes longer than its deadline fails the test.
"""

import asyncio
import base64
import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import aiohttp
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from tests.e2e.forgeries import forged_params, knock, malformed_params, send_as_member
from tests.e2e.harness import (
    PREFILL_PARAMS,
    Answer,
    Engine,
    Prompt,
    ask,
    metrics,
    new_session,
    prefill,
    until,
)
from tests.vllm.abused_cluster import (
    DEADLINE_S,
    FAILED,
    FINISHED,
    SOON_S,
    Decoder,
    VllmCluster,
    ask_wrongly,
    assert_hands_over,
    fresh,
    kill,
    unharmed,
)
from tests.vllm.conftest import Trio
from tests.vllm.vllm_asking import ONLY_THE_BEST, assert_free, stream
from tests.vllm.wire import greet, listening, send_noise, side_channel

from kvferry.protocol.tickets import TicketKey

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

CONTEXT = 2048


@pytest.fixture(scope="module")
def vllm_cluster(trio: Trio) -> Iterator[VllmCluster]:
    vllm_cluster = VllmCluster.start(trio)
    yield vllm_cluster
    vllm_cluster.stop()


@pytest.fixture(params=["fail", "recompute"])
def d(request: pytest.FixtureRequest, vllm_cluster: VllmCluster) -> Decoder:
    return Decoder(
        vllm_cluster.trio.d if request.param == "fail" else vllm_cluster.lenient, request.param
    )


# For cases in which no load fails, so that the failure policy decides nothing.
any_policy = pytest.mark.parametrize(
    "d", ["fail", pytest.param("recompute", marks=pytest.mark.exhaustive)], indirect=True
)


def nobodys_params(
    genuine: Mapping[str, Any], another_key: TicketKey, key: TicketKey
) -> Iterator[dict[str, Any]]:
    """Parameters that cannot lead to a fetch."""
    yield from forged_params()
    without_ticket = {name: value for name, value in genuine.items() if name != "ticket"}
    yield without_ticket
    yield from (
        {name: value for name, value in without_ticket.items() if name != left_out}
        for left_out in ("remote_host", "tp_size")
    )
    raw = bytearray(base64.urlsafe_b64decode(genuine["ticket"]))
    raw[len(raw) // 2] ^= 1
    yield {**genuine, "ticket": base64.urlsafe_b64encode(raw).decode()}
    yield {**genuine, "ticket": another_key.sign(key.open(genuine["ticket"]))}
    yield {**genuine, "ticket": genuine["ticket"] * 50}
    yield {**genuine, "do_remote_decode": True}
    yield {**genuine, "do_remote_prefill": "yes"}


def test_parameters_without_a_genuine_ticket_get_the_failure_policy(
    vllm_cluster: VllmCluster, d: Decoder
) -> None:
    """They include T1 and T3 of the conformance list for pull connectors."""

    async def check() -> None:
        async with unharmed(vllm_cluster, d.engine) as session:
            genuine = await prefill(session, vllm_cluster.brief, fresh())
            key = TicketKey(vllm_cluster.trio.fleet.secret)
            for params in nobodys_params(genuine, TicketKey(b"another cluster"), key):
                answer = await ask_wrongly(session, vllm_cluster, d, fresh(max_tokens=2), params)
                assert answer.is_ok == d.computes, (params, answer.body)

    asyncio.run(check())


def test_what_stands_beside_a_genuine_ticket_is_not_used(
    vllm_cluster: VllmCluster, d: Decoder
) -> None:
    lies: list[dict[str, Any]] = [
        {
            "remote_host": "192.0.2.1",
            "remote_port": 1,
            "remote_block_ids": [[99_999]],
            "tp_size": 64,
        },
        {
            "remote_host": None,
            "remote_engine_id": ["x"],
            "remote_request_id": {"a": 1},
            "pp_size": "1",
            "dcp_size": -1,
        },
        {"remote_block_ids": [list(range(50_000))], "remote_num_tokens": 10**9},
        {"remote_block_ids": {"a": [[]]}, "padding": "x" * 1_000_000, "transfer_mode": "push"},
        {str(number): number for number in range(5_000)},
        {"remote_registration_generation": None},
        {"remote_registration_generation": "x", "remote_engine_id": "prefill"},
        {
            "prompt_token_ids": [1, 2, 3],
            "_remote_blocks_processed": True,
            "_p_side_truncated": True,
        },
    ]

    async def check() -> None:
        async with unharmed(vllm_cluster, d.engine, timeout_s=SOON_S) as session:
            for lie in lies:
                prompt = fresh()
                answer = await ask_wrongly(
                    session,
                    vllm_cluster,
                    d,
                    prompt,
                    {**await prefill(session, vllm_cluster.trio.p, prompt), **lie},
                )
                assert answer.is_ok, answer.body

    asyncio.run(check())


def test_values_of_every_kind_never_kill_an_engine(
    vllm_cluster: VllmCluster, pytestconfig: pytest.Config
) -> None:
    num_examples = 60 if pytestconfig.getoption("--exhaustive") else 30
    prompt = fresh(40, max_tokens=1)
    targets = [vllm_cluster.trio.d, vllm_cluster.lenient, vllm_cluster.trio.p]
    # Deeply nested values pass JSON and msgpack, and would end the engine when it pickles them for
    # its workers.
    deep = [
        nested(200),
        nested(300),
        {"do_remote_prefill": True, "ticket": nested(400)},
        {"do_remote_decode": True, "x": nested(400)},
    ]
    cases = [*zip(examples(num_examples), itertools.cycle(targets), strict=False)]
    cases += [
        (params, target)
        for params in [*deep, {"do_remote_prefill": "\ud800"}]
        for target in targets
    ]

    async def check() -> None:
        async with unharmed(vllm_cluster) as session:
            right = await ask(session, vllm_cluster.trio.p, prompt)
            for params, target in cases:
                answer = await ask(session, target, prompt, kv_transfer_params=params)
                assert answer == right if answer.is_ok else answer.status in (400, 500), answer.body

    asyncio.run(check())


def examples(count: int) -> list[Any]:
    found: list[Any] = []

    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(malformed_params)
    def collect(params: Any) -> None:
        found.append(params)

    collect()
    return found


def nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(depth):
        value = {"a": [value]}
    return value


def test_a_ticket_is_good_for_the_tokens_it_was_issued_for_and_no_others(
    vllm_cluster: VllmCluster, d: Decoder
) -> None:
    """T6: D's prompt is longer than P's, shorter, or another one; also by whole blocks and at block
    boundaries.
    """

    def variants(tokens: tuple[int, ...]) -> Sequence[tuple[int, ...]]:
        other = fresh(len(tokens)).token_ids
        return [
            other,
            (*tokens, *other[:1]),
            (*tokens, *other),
            tokens[:1],
            tokens[:33],
            tokens[:64],
            (other[0], *tokens[1:]),
            (*tokens[:64], *other[64:]),
            (*tokens[:-1], other[-1]),
        ]

    async def check() -> None:
        async with unharmed(vllm_cluster, d.engine) as session:
            for index in range(9):
                prompt = fresh(96 if index % 2 else 100)
                params = await prefill(session, vllm_cluster.trio.p, prompt)
                asked = Prompt(variants(prompt.token_ids)[index], max_tokens=8)
                answer = await ask_wrongly(session, vllm_cluster, d, asked, params)
                assert answer.is_ok, (index, answer.body)

    asyncio.run(check())


def test_a_ticket_used_again_never_gives_wrong_tokens(
    vllm_cluster: VllmCluster, d: Decoder
) -> None:
    """The same prompt and other prompts use the ticket again, one after another and at the same
    time.
    """

    async def check() -> None:
        async with unharmed(vllm_cluster, d.engine) as session:
            first, second = fresh(), fresh()
            params = await prefill(session, vllm_cluster.trio.p, first)
            for prompt in (first, second, first):
                await ask_wrongly(session, vllm_cluster, d, prompt, params)
            first = fresh()
            params = await prefill(session, vllm_cluster.trio.p, first)
            prompts = [
                first,
                fresh(),
                Prompt((*first.token_ids[:70], *fresh(30).token_ids), 8),
                first,
                fresh(),
            ]
            answers = await asyncio.gather(
                *(ask_wrongly(session, vllm_cluster, d, prompt, params) for prompt in prompts)
            )
            assert answers[0].is_ok

    asyncio.run(check())


def test_one_ticket_may_be_read_by_two_engines_at_the_same_time(vllm_cluster: VllmCluster) -> None:
    both = [Decoder(vllm_cluster.trio.d, "fail"), Decoder(vllm_cluster.lenient, "recompute")]

    async def check() -> None:
        async with unharmed(vllm_cluster) as session:
            for _ in range(3):
                prompt = fresh(300)
                params = await prefill(session, vllm_cluster.trio.p, prompt)
                answers = await asyncio.gather(
                    *(ask_wrongly(session, vllm_cluster, one, prompt, params) for one in both)
                )
                assert answers[1].is_ok

    asyncio.run(check())


@pytest.mark.parametrize("do_remote_prefill", [True, False])
def test_parameters_of_another_direction_do_no_harm_to_the_prefill_side(
    vllm_cluster: VllmCluster, do_remote_prefill: bool
) -> None:
    """T7: P gets its own ticket, and parameters that a multi-turn router would pass on from a D,
    each twice.
    """

    async def check() -> None:
        p = Decoder(vllm_cluster.trio.p, "fail")
        async with unharmed(vllm_cluster) as session:
            for _ in range(2):
                prompt = fresh()
                params = await prefill(session, vllm_cluster.trio.p, prompt)
                assert (await ask_wrongly(session, vllm_cluster, p, prompt, params)).is_ok
                backward = {
                    **params,
                    "do_remote_prefill": do_remote_prefill,
                    "do_remote_decode": True,
                    "remote_engine_id": "decode",
                }
                answer = await ask_wrongly(
                    session, vllm_cluster, p, prompt, {**backward, "remote_num_tokens": 96}
                )
                assert answer.is_ok != do_remote_prefill
                if answer.is_ok:
                    await ask_wrongly(
                        session,
                        vllm_cluster,
                        Decoder(vllm_cluster.trio.d, "fail"),
                        prompt,
                        answer.body["kv_transfer_params"],
                    )

    asyncio.run(check())


@any_policy
def test_four_choices_leave_no_lease_behind(vllm_cluster: VllmCluster, d: Decoder) -> None:
    """T11: P computes the prompt four times and answers with the parameters of one. Then a request
    with four choices is never fetched at all.
    """

    async def check() -> None:
        async with unharmed(vllm_cluster, d.engine, timeout_s=SOON_S) as session:
            prompt = fresh(200)
            four = {"n": 4, **ONLY_THE_BEST}
            made = await ask(
                session,
                vllm_cluster.trio.p,
                prompt,
                max_tokens=1,
                kv_transfer_params=PREFILL_PARAMS,
                **four,
            )
            answer = await ask(
                session,
                d.engine,
                prompt,
                kv_transfer_params=made.body["kv_transfer_params"],
                **four,
            )
            assert (
                answer.token_ids == (await ask(session, vllm_cluster.trio.p, prompt)).token_ids * 4
            )
            assert (
                await ask(
                    session,
                    vllm_cluster.brief,
                    fresh(),
                    max_tokens=1,
                    kv_transfer_params=PREFILL_PARAMS,
                    **four,
                )
            ).is_ok

    asyncio.run(check())


@any_policy
def test_odd_requests_for_prefill_and_decode(vllm_cluster: VllmCluster, d: Decoder) -> None:
    """Requests that are streamed, have one token or many tokens, or are longer than the context.
    The parameters of a streamed prefill reach no D.
    """

    async def check() -> None:
        async with unharmed(vllm_cluster, d.engine, timeout_s=SOON_S) as session:
            prompt = fresh()
            right = await ask(session, vllm_cluster.trio.p, prompt)
            assert (
                await stream(
                    session, vllm_cluster.brief, prompt, kv_transfer_params=PREFILL_PARAMS
                ),
            ) == right.token_ids
            params = await prefill(session, vllm_cluster.trio.p, prompt)
            assert (
                await stream(session, d.engine, prompt, kv_transfer_params=params),
            ) == right.token_ids

            prompt = fresh(64)
            answer = await ask_wrongly(
                session,
                vllm_cluster,
                d,
                prompt,
                await prefill(session, vllm_cluster.trio.p, prompt),
                max_tokens=1,
            )
            assert answer.is_ok

            prompt = fresh(60, max_tokens=20)
            decoded = await ask(
                session, vllm_cluster.trio.p, prompt, kv_transfer_params=PREFILL_PARAMS
            )
            assert (
                await ask_wrongly(
                    session, vllm_cluster, d, prompt, decoded.body["kv_transfer_params"]
                )
            ).is_ok

            too_long = fresh(CONTEXT + 10)
            assert (
                await ask(session, vllm_cluster.trio.p, too_long, kv_transfer_params=PREFILL_PARAMS)
            ).status == 400
            # D reports to P that it will not read: otherwise P would hold the blocks for its whole
            # lease.
            params = await prefill(session, vllm_cluster.trio.p, fresh())
            assert (await ask(session, d.engine, too_long, kv_transfer_params=params)).status == 400
            assert (
                await ask(
                    session, d.engine, too_long, kv_transfer_params={"do_remote_prefill": True}
                )
            ).status == 400

    asyncio.run(check())


@any_policy
@pytest.mark.parametrize("name", ["a,b", "HB:1,2:3", "0_1", "x" * 600, "É ö %s {}"])
def test_ids_that_clients_choose_change_nothing(
    vllm_cluster: VllmCluster, d: Decoder, name: str
) -> None:
    """T10, and several requests with one id at the same time."""

    async def check() -> None:
        async with (
            unharmed(vllm_cluster, d.engine, timeout_s=SOON_S),
            aiohttp.ClientSession(headers={"X-Request-Id": name}) as named,
        ):

            async def one(prompt: Prompt) -> None:
                answer = await ask(
                    named,
                    vllm_cluster.trio.p,
                    prompt,
                    max_tokens=1,
                    kv_transfer_params=PREFILL_PARAMS,
                )
                await ask_wrongly(named, vllm_cluster, d, prompt, answer.body["kv_transfer_params"])

            await asyncio.wait_for(asyncio.gather(*(one(fresh()) for _ in range(3))), DEADLINE_S)

    asyncio.run(check())


@any_policy
def test_clients_that_leave_at_any_moment_leave_nothing_behind(
    vllm_cluster: VllmCluster, d: Decoder
) -> None:
    """Includes T2: clients leave while their requests wait in D's queue, load or decode; some
    requests have parameters that name no P.
    """

    async def check() -> None:
        rng = random.Random(d.policy)
        async with unharmed(vllm_cluster, d.engine, timeout_s=SOON_S) as session:
            load = [
                asyncio.create_task(ask(session, d.engine, fresh(40, max_tokens=150)))
                for _ in range(6)
            ]
            leaving = []
            for number in range(24):
                prompt = fresh(300, max_tokens=40)
                params = (
                    {"do_remote_prefill": True}
                    if number % 6 == 5
                    else await prefill(session, vllm_cluster.trio.p, prompt)
                )
                leaving.append(
                    asyncio.create_task(ask(session, d.engine, prompt, kv_transfer_params=params))
                )
                if number % 2:
                    await asyncio.sleep(rng.random() * 0.5)
                    for task in leaving:
                        task.cancel()
                    await asyncio.gather(*leaving, return_exceptions=True)
                    leaving.clear()
            for answer in await asyncio.gather(*load):
                assert answer.is_ok

    asyncio.run(check())


def test_clients_that_leave_the_prefill_side_leave_nothing_behind(
    vllm_cluster: VllmCluster,
) -> None:
    async def check() -> None:
        rng = random.Random(3)
        async with unharmed(vllm_cluster) as session:
            for _ in range(16):
                tasks = [
                    asyncio.create_task(
                        ask(
                            session,
                            vllm_cluster.brief,
                            fresh(length, max_tokens=1),
                            kv_transfer_params=PREFILL_PARAMS,
                        )
                    )
                    for length in (1000, 400)
                ]
                await asyncio.sleep(rng.random() * 0.4)
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(check())


def test_noise_at_every_port_changes_nothing(vllm_cluster: VllmCluster) -> None:
    """T4: the side channels and worker ports of P and D get noise from strangers and from a cluster
    member with a bug.
    """
    secret = vllm_cluster.trio.fleet.secret

    async def check() -> None:
        async with unharmed(vllm_cluster) as session:
            for engine in (vllm_cluster.trio.p, vllm_cluster.trio.d):
                address = await side_channel(session, engine, fresh())
                ports = listening(engine) - {engine.address.port}
                assert int(address.rpartition(":")[2]) in ports
                held = [each for port in ports for each in knock("127.0.0.1", port, times=150)]
                send_as_member(secret, address)
                send_noise(secret, greet(secret, address).control_address)
                for each in held:
                    each.close()

    asyncio.run(check())


def test_notifications_of_a_foreign_nixl_agent_are_ignored(vllm_cluster: VllmCluster) -> None:
    """T5: our transports use no NIXL notifications; one that vLLM's connector would read as a
    message about a request must be ignored.
    """
    from nixl._api import nixl_agent, nixl_agent_config

    notes = [
        b"no colon",
        b"request:many",
        b"\xff\xfe\x00",
        b"HB:",
        b"PUSH_REG:" + b"x" * 5_000,
        b"",
        b"a" * 100_000,
    ]

    async def check() -> None:
        async with unharmed(vllm_cluster) as session:
            stranger = nixl_agent("stranger", nixl_agent_config(backends=["UCX"]))
            for engine in (vllm_cluster.trio.p, vllm_cluster.trio.d):
                layout = greet(
                    vllm_cluster.trio.fleet.secret, await side_channel(session, engine, fresh())
                )
                blob = next(offer.blob for offer in layout.offers if offer.transport == "nixl")
                _, metadata, *_ = msgspec.msgpack.decode(blob)
                name = stranger.add_remote_agent(metadata)
                for note in notes:
                    stranger.send_notif(name, note)
                await asyncio.sleep(0.5)
                stranger.remove_remote_agent(name)

    asyncio.run(check())


def test_a_ticket_whose_lease_ran_out_is_refused_never_read_wrong(
    vllm_cluster: VllmCluster, d: Decoder
) -> None:
    """T9: P has reused the blocks for other prompts. In the first round, D gets the request after
    that and learns it when it attaches; in the second, D gets the request before that and is
    stopped meanwhile.
    """

    async def check() -> None:
        async with unharmed(vllm_cluster, d.engine) as session:
            for is_paused in (False, True):
                await assert_hands_over(session, vllm_cluster, d.engine, vllm_cluster.brief)
                failed = (await metrics(session, d.engine))[FAILED]
                prompt = fresh(300)
                params = await prefill(session, vllm_cluster.brief, prompt)
                # This needs a separate session: the API server closes connections that were idle
                # before it was stopped.
                async with new_session(DEADLINE_S) as own:
                    if is_paused:
                        d.engine.pause()
                        late = asyncio.create_task(
                            ask(own, d.engine, prompt, kv_transfer_params=params)
                        )
                    try:
                        await assert_free(session, vllm_cluster.brief)
                        for _ in range(7):
                            assert (
                                await ask(session, vllm_cluster.brief, fresh(1500, max_tokens=1))
                            ).is_ok
                    finally:
                        d.engine.resume()
                    if not is_paused:
                        late = asyncio.create_task(
                            ask(own, d.engine, prompt, kv_transfer_params=params)
                        )
                    answer = await late
                assert answer.is_ok == d.computes
                right = await ask(session, vllm_cluster.trio.p, prompt)
                assert not answer.is_ok or answer == right
                assert await ask(session, d.engine, prompt) == right
                assert (await metrics(session, d.engine))[FAILED] == failed + 1

    asyncio.run(check())


def test_a_silent_prefill_side_delays_nobody_elses_first_contact(vllm_cluster: VllmCluster) -> None:
    """T13: D has forgotten all peers; four requests wait for a P that does not answer, while D
    fetches blocks from another P.
    """
    d = vllm_cluster.lenient

    async def check() -> None:
        async with unharmed(vllm_cluster, d) as session:
            lost = [fresh() for _ in range(4)]
            tickets = [await prefill(session, vllm_cluster.brief, prompt) for prompt in lost]
            prompt = fresh()
            params = await prefill(session, vllm_cluster.trio.p, prompt)
            await until("D has forgotten its peers", lambda: _knows_nobody(session, d))
            finished = (await metrics(session, d))[FINISHED]
            vllm_cluster.brief.pause()
            try:
                waiting = [
                    asyncio.create_task(ask(session, d, p, kv_transfer_params=t))
                    for p, t in zip(lost, tickets, strict=True)
                ]
                await until("D waits for all four", lambda: _is_pulling(session, d, 4))
                answer = await ask(session, d, prompt, kv_transfer_params=params)
                assert not any(task.done() for task in waiting)
                assert (await metrics(session, d))[FINISHED] == finished + 1
                late = await asyncio.gather(*waiting)
            finally:
                vllm_cluster.brief.resume()
            for asked, given in zip([prompt, *lost], [answer, *late], strict=True):
                assert given == await ask(session, vllm_cluster.trio.p, asked), given.body

    asyncio.run(check())


async def _knows_nobody(session: aiohttp.ClientSession, engine: Engine) -> bool:
    # Any step makes the engine check its deadlines and update its metrics.
    await ask(session, engine, Prompt((11,), 1))
    return (await metrics(session, engine))["kvferry:num_peers"] == 0


async def _is_pulling(session: aiohttp.ClientSession, engine: Engine, count: int) -> bool:
    return (await metrics(session, engine))["kvferry:num_transfers"] >= count


def test_the_decode_sides_survive_the_death_and_return_of_a_prefill_side(
    vllm_cluster: VllmCluster,
) -> None:
    """T12: P is killed with SIGKILL while both D read; it is stopped before that, so that some
    reads have their bytes but no confirmation. Then a new incarnation of P answers at the same
    address and refuses the tickets of the old one.
    """
    both = [Decoder(vllm_cluster.trio.d, "fail"), Decoder(vllm_cluster.lenient, "recompute")]
    prompts = {decoder.policy: [fresh(64) for _ in range(30)] for decoder in both}

    async def is_read(session: aiohttp.ClientSession, decoder: Decoder) -> bool:
        """On a busy machine P's lease of 4 s may run out before D reads."""
        finished = (await metrics(session, decoder.engine))[FINISHED]
        prompt = fresh(64)
        await outcome(session, decoder, prompt, await prefill(session, vllm_cluster.brief, prompt))
        return (await metrics(session, decoder.engine))[FINISHED] > finished

    async def outcome(
        session: aiohttp.ClientSession, decoder: Decoder, prompt: Prompt, params: dict[str, Any]
    ) -> Answer:
        answer = await ask(session, decoder.engine, prompt, kv_transfer_params=params)
        assert not answer.is_ok or answer == await ask(session, vllm_cluster.trio.p, prompt)
        assert answer.is_ok or not decoder.computes
        return answer

    async def die() -> None:
        async with new_session(DEADLINE_S) as session:
            asked: dict[str, list[asyncio.Task[Answer]]] = {"fail": [], "recompute": []}
            for decoder in both:
                await until("D reads from P", partial(is_read, session, decoder))
                made = await asyncio.gather(
                    *(
                        prefill(session, vllm_cluster.brief, prompt)
                        for prompt in prompts[decoder.policy]
                    )
                )
                pairs = list(zip(prompts[decoder.policy], made, strict=True))
                asked[decoder.policy] += [
                    asyncio.create_task(outcome(session, decoder, *pair)) for pair in pairs[:10]
                ]
                await asyncio.wait(asked[decoder.policy], return_when=asyncio.FIRST_COMPLETED)
                if decoder is both[-1]:
                    vllm_cluster.brief.pause()
                asked[decoder.policy] += [
                    asyncio.create_task(outcome(session, decoder, *pair)) for pair in pairs[10:20]
                ]
                if decoder is both[-1]:
                    await until(
                        "D waits for some", lambda: _is_pulling(session, vllm_cluster.lenient, 1)
                    )
                    kill(vllm_cluster.brief)
                leftover[decoder.policy] = pairs[20:]
            for decoder in both:
                tasks = [
                    *asked[decoder.policy],
                    *(
                        asyncio.create_task(outcome(session, decoder, *pair))
                        for pair in leftover[decoder.policy]
                    ),
                ]
                answers = await asyncio.gather(*tasks)
                assert decoder.computes or not all(answer.is_ok for answer in answers)

    leftover: dict[str, list[tuple[Prompt, dict[str, Any]]]] = {}
    asyncio.run(die())
    vllm_cluster.replace_brief()

    async def go_on() -> None:
        async with unharmed(vllm_cluster) as session:
            for decoder in both:
                assert (
                    await ask_wrongly(session, vllm_cluster, decoder, *leftover[decoder.policy][0])
                ).is_ok == decoder.computes
                for _ in range(5):
                    await assert_hands_over(
                        session, vllm_cluster, decoder.engine, vllm_cluster.brief
                    )

    asyncio.run(go_on())
