"""Tests NIXL over TCP between hosts, which an operator must select by name: no fault of the cable
leads to a wrong token.

Nothing more is guaranteed: when a reader's connection breaks, UCX may end the P that is being read
(docs/faults.md). The test then starts P again.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest
from tests.e2e.conftest import Network, connected
from tests.e2e.handovers import assert_recovers, count, fresh
from tests.e2e.harness import Engine, ask, assert_quiescent, new_session
from tests.e2e.hosts import skip_unless_possible
from tests.e2e.test_network import EXPIRED, LONG, begin_reads, cut_during_reads, right_answers, warm

from kvferry.errors import KVFerryError

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Network]:
    skip_unless_possible()
    with connected("nixl", tmp_path_factory.mktemp("nixl"), model) as made:
        yield made


def test_a_slow_cable_only_takes_its_time(network: Network, plain: Engine) -> None:
    async def story() -> None:
        async with new_session() as session:
            await warm(session, network)
            prompts = {policy: fresh(LONG) for policy in network.decoders}
            right = await right_answers(plain, prompts)
            expired = await count(session, network.p, EXPIRED)
            with network.throttled("16mbit"):
                reading = await begin_reads(session, network, prompts)
                assert {policy: await task for policy, task in reading.items()} == right
            assert await count(session, network.p, EXPIRED) == expired
            await assert_quiescent(session, network.p, *network.decoders.values())

    asyncio.run(story())


def test_a_cable_cut_during_the_read_brings_no_wrong_token_when_it_heals(
    network: Network, plain: Engine
) -> None:
    """D gives the blocks of the broken read to other prompts at once; what P still sends must not
    reach them.
    """

    async def story() -> None:
        async with new_session() as session:
            await cut_during_reads(session, network, plain, *network.decoders.values())
            await assert_right_tokens(session, network, plain)
            restart_p_if_ucx_has_ended_it(network)
            for d in network.decoders.values():
                await assert_recovers(session, network.p, d, plain)
            await assert_quiescent(session, network.p, *network.decoders.values())

    asyncio.run(story())


async def assert_right_tokens(
    session: aiohttp.ClientSession, network: Network, plain: Engine
) -> None:
    """Check prompts that D computes itself, in the blocks that were freed, while the reconnected P
    may still be sending.
    """
    prompts = [fresh(LONG, max_tokens=40) for _ in range(3)]
    for prompt in prompts:
        right = await ask(session, plain, prompt)
        for d in network.decoders.values():
            assert await ask(session, d, prompt) == right


def restart_p_if_ucx_has_ended_it(network: Network) -> None:
    try:
        network.p.process.check_alive()
    except KVFerryError:
        network.replace_p()
