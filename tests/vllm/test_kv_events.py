"""Tests that a router can follow the tiers of a real vLLM server by its KV events."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq
from tests.e2e.harness import Prompt, ask_all, until
from tests.vllm.block_index import BlockIndex, Place
from tests.vllm.fleet import Fleet, ready
from tests.vllm.test_tiers import OFFLOADING, Storage, object_server, storage

from kvferry.cli.main import main

__all__ = ["object_server", "storage"]

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

NUM_CPU_BLOCKS = 20
DISK_SIZE = "8MiB"
PROMPTS = [
    Prompt(tuple(10 + (number + 7 * n) % 480 for n in range(32 * 12 + 5)), max_tokens=2)
    for number in range(12)
]
"""Twelve chunks each, of which no two prompts share one."""
EMPTY_STEP = Prompt((11, 12, 13), max_tokens=1)
"""Makes the engine take steps, and is too short to be stored."""


class Subscriber(BlockIndex):
    """Receives the events of one server, which may start later."""

    def __init__(self, endpoint: str) -> None:
        super().__init__()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.subscribe(b"")
        self._socket.connect(endpoint)
        self.endpoint = endpoint
        self._next_number = 0

    def receive(self) -> None:
        """Apply all events that have arrived."""
        while self._socket.poll(0):
            _, number, payload = self._socket.recv_multipart()
            assert int.from_bytes(number) == self._next_number, "a batch was lost"
            self._next_number += 1
            for event in msgspec.msgpack.decode(payload)[1]:
                self.apply(event)

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.fixture
def subscriber(storage: Storage) -> Iterator[Subscriber]:
    # vLLM binds a socket of this kind. Of tcp, it binds wildcards only.
    made = Subscriber(f"ipc://{storage.folder}/events")
    yield made
    made.close()


def count_objects(capsys: pytest.CaptureFixture[str], *place: str) -> int:
    """How many objects a tier holds, as `kvferry store` says."""
    assert main(["store", "ls", "--json", *place]) == 0
    (row,) = json.loads(capsys.readouterr().out)["namespaces"]
    return int(row["objects"])


def test_a_router_that_follows_the_events_knows_what_the_tiers_hold(
    tmp_path: Path,
    model: Path,
    storage: Storage,
    subscriber: Subscriber,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pool, disk = storage.folder / "pool", storage.folder / "disk"
    extra = {
        "num_cpu_blocks": NUM_CPU_BLOCKS,
        "tiers": [{"disk": {"path": str(disk), "size": DISK_SIZE}}],
        "pool_path": str(pool),
        "break_even": False,
    }
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": subscriber.endpoint,
    }
    flags = ("--kv-events-config", json.dumps(events))
    with Fleet(tmp_path / "fleet", model) as fleet:
        engine = fleet.vllm("engine", *flags, transfer=OFFLOADING, extra=extra)
        ready(engine)

        async def has_caught_up() -> bool:
            await ask_all(engine, [EMPTY_STEP])
            subscriber.receive()
            return (
                len(subscriber.hashes("CPU")),
                len(subscriber.hashes("STORAGE", "disk")),
            ) == (
                count_objects(capsys, "--pool", str(pool)),
                count_objects(capsys, "--disk", str(disk)),
            )

        async def fill() -> None:
            # The second time, the first prompts come from the disk or are computed again.
            for prompt in [*PROMPTS, *PROMPTS]:
                await ask_all(engine, [prompt])
            await until("the events tell what the tiers hold", has_caught_up)

        asyncio.run(fill())
    assert len(subscriber.hashes("CPU")) == NUM_CPU_BLOCKS
    for place, blocks in subscriber.places.items():
        # Also of blocks that have left the GPU's cache.
        assert blocks.items() <= subscriber.seen.items()
        if place.medium != "GPU":
            assert subscriber.num_removed[place] > 0
    assert set(subscriber.places) == {Place("GPU"), Place("CPU"), Place("STORAGE", "disk")}
