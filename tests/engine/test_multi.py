"""Tests `MultiConnector` in real engines: our connector between engines beside a store, on one rank
and on two.

The store's code is in tests/connectors/store_connector.py; each rank keeps its own part in its own
process.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.connectors.store_connector import child
from tests.engine.test_core import DEADLINE_S, ask, collect, is_quiet, prompt, until

from kvferry.config import KVTransferConfig, SideChannelConfig
from kvferry.engine.client import EngineClient
from kvferry.engine.make_model.writer import make_model
from kvferry.engine.options import EngineOptions
from kvferry.transports.registry import ConfiguredTransportKit

pytestmark = pytest.mark.slow

PULL = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
SECRET = b"a secret for tests, shared by both sides"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    make_model(directory)
    return directory


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    with asyncio.Runner() as runner:
        yield runner.get_loop()


async def start(model: Path, name: str, *children: dict[str, Any], **more: Any) -> EngineClient:
    """Start an engine with these connectors; one connector is used without a MultiConnector."""
    multi = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": list(children)},
    }
    transfer = children[0] if len(children) == 1 else multi
    options = EngineOptions(
        model=model,
        num_blocks=64,
        enable_prefix_caching=False,
        kv_transfer=KVTransferConfig.from_mapping({**transfer, "engine_id": name}),
        **more,
    )
    side_channel = SideChannelConfig(port=0)
    kit = ConfiguredTransportKit(
        side_channel.bind_host, side_channel.advertised_host, 0, SECRET, transports=("tcp",)
    )
    return await EngineClient.start(options, kit, secret=SECRET, side_channel=side_channel)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_store_beside_our_connector_gives_the_same_tokens_again(
    model: Path, loop: asyncio.AbstractEventLoop, num_ranks: int
) -> None:
    async def story() -> None:
        client = await start(
            model, "d", PULL, child("StoreConnector", "d"), tensor_parallel_size=num_ranks
        )
        try:
            tokens = prompt(31, 45)
            first, one = await collect(client, ask("first", tokens))
            await until(client, is_quiet)
            second, other = await collect(client, ask("second", tokens))
            assert (one.num_cached_tokens, other.num_cached_tokens) == (0, 32)
            assert first == second
            status = await until(client, is_quiet)
            assert status.connector_stats["children"]["StoreConnector"]["store_loads"] == num_ranks
            assert "side_channel" in status.connector_stats
        finally:
            await client.close()

    loop.run_until_complete(asyncio.wait_for(story(), DEADLINE_S))


def test_the_store_of_d_gives_the_prefix_and_p_the_rest(
    model: Path, loop: asyncio.AbstractEventLoop
) -> None:
    async def story() -> None:
        p = await start(model, "p", PULL)
        d = await start(model, "d", PULL, child("StoreConnector", "d"))
        try:
            stem, tokens = prompt(1, 40, stem=40), prompt(31, 90, stem=40)
            right, _ = await collect(p, ask("right", tokens))
            await collect(d, ask("stem", stem, max_tokens=1))
            await until(d, is_quiet)
            _, leg = await collect(
                p, ask("prefill", tokens, 1, kv_transfer_params={"do_remote_decode": True})
            )
            got, last = await collect(
                d, ask("decode", tokens, kv_transfer_params=leg.kv_transfer_params)
            )
            assert (got, last.num_cached_tokens) == (right, 89)
            status = await until(d, is_quiet)
            assert status.connector_stats["children"]["StoreConnector"]["store_loads"] == 1
            assert status.connector_stats["finished_loads"] == 1
            # 32 of 90 tokens came from the store.
            moved = sum(summary.total_bytes for summary in status.transfers)
            assert 0 < moved < 90 * 0.7 * (await _bytes_per_token(p, d, tokens))
            await until(p, is_quiet)
        finally:
            await d.close()
            await p.close()

    loop.run_until_complete(asyncio.wait_for(story(), DEADLINE_S))


async def _bytes_per_token(p: EngineClient, d: EngineClient, tokens: list[int]) -> float:
    """How many bytes a prompt without a stored prefix takes; its first token is another one."""
    before = sum(summary.total_bytes for summary in (await d.status()).transfers)
    other = [tokens[0] + 1, *tokens[1:]]
    _, leg = await collect(
        p, ask("prefill 2", other, 1, kv_transfer_params={"do_remote_decode": True})
    )
    await collect(d, ask("decode 2", other, kv_transfer_params=leg.kv_transfer_params))
    after = sum(summary.total_bytes for summary in (await d.status()).transfers)
    return (after - before) / len(tokens)
