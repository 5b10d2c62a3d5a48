"""Tests that the NIXL transport refuses bad input with a clear error, and exits without a crash."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.transports.sides import nixl_side

from kvferry.errors import ConfigError, LocalProtocolError, MissingDependency, TransportError
from kvferry.testing.transport_pairs import TransportSide
from kvferry.transports.base import Completion, Segments, TransportOffer
from kvferry.transports.nixl.transport import NixlTransport
from kvferry.types import EngineId, Epoch, MemoryKind, PeerId, Region

PEER = PeerId(EngineId("far"), Epoch("1"), 0)
DEADLINE_S = 60.0
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def side() -> Iterator[TransportSide]:
    made = nixl_side()
    yield made
    made.close()


def test_without_nixl_the_fix_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl", None)
    with pytest.raises(MissingDependency, match="pip install nixl"):
        NixlTransport().register([Region("kv", 4096, 64, 64, 1)])


def test_a_backend_that_is_not_there_is_a_mistake_of_the_operator() -> None:
    memory = np.zeros(4096, np.uint8)
    with pytest.raises(ConfigError, match="NOSUCH"):
        NixlTransport(backends=("UCX", "NOSUCH")).register(
            [Region("kv", memory.ctypes.data, 64, 64, 64)]
        )


def test_memory_of_several_kinds_or_of_no_device_is_not_carried() -> None:
    memory = np.zeros(4096, np.uint8)
    here = Region("k", memory.ctypes.data, 64, 64, 32)
    there = Region("v", memory.ctypes.data + 2048, 64, 64, 32, MemoryKind.VRAM)
    transport = NixlTransport()
    assert not transport.register([here, there])
    assert not transport.register([there])
    with pytest.raises(LocalProtocolError):
        transport.offer()
    transport.close()


def test_offers_that_lie_are_refused_and_a_good_one_still_works(side: TransportSide) -> None:
    far = nixl_side()
    name, metadata = msgspec.msgpack.decode(far.transport.offer().blob)
    for blob in (
        (name, b"garbage"),
        (name, b""),
        ("another", metadata),
        (name,),
        (name, "text"),
        5,
    ):
        with pytest.raises(TransportError):
            side.transport.connect(
                PEER, TransportOffer("nixl", "", msgspec.msgpack.encode(blob)), far.regions
            )
    with pytest.raises(TransportError, match="this engine itself"):
        side.transport.connect(PEER, side.transport.offer(), side.regions)
    with pytest.raises(TransportError):
        side.transport.connect(PEER, far.transport.offer(), [Region("kv", 2**63, 64, 64, 1)])
    side.transport.connect(PEER, far.transport.offer(), far.regions)
    far.memory[:] = 5
    zero = np.array([0], np.int64)
    side.transport.read(PEER, [Segments(0, 0, 4096, zero, zero)])
    ended: list[Completion] = []
    deadline = time.monotonic() + DEADLINE_S
    while not ended:
        assert time.monotonic() < deadline
        far.transport.poll()
        ended = side.transport.poll()
    assert ended[0].ok
    assert side.memory.max() == 5
    side.transport.disconnect(PEER)
    far.close()


def test_memory_that_the_peer_did_not_register_is_refused_by_a_failed_transfer(
    side: TransportSide,
) -> None:
    far = nixl_side()
    elsewhere = [Region("kv", 4096, 64, 64, 100)]
    side.transport.connect(PEER, far.transport.offer(), elsewhere)
    zero = np.array([0], np.int64)
    handle = side.transport.read(PEER, [Segments(0, 0, 64, zero, zero)])
    ended = [completion for _ in range(3) for completion in side.transport.poll()]
    assert [completion.handle for completion in ended] == [handle]
    assert ended[0].error is not None
    with pytest.raises(TransportError):
        side.transport.read(PEER, [Segments(0, 0, 64, zero, zero)])
    far.close()


def test_settings_are_made_unless_the_user_has_and_an_unclosed_transport_ends_well() -> None:
    program = (
        "import os; from tests.transports.sides import nixl_side; side = nixl_side(); "
        "side.transport.poll();"
        "print(os.environ['UCX_RCACHE_MAX_UNRELEASED'], os.environ['NIXL_LOG_LEVEL'], "
        "'UCX_CUDA_IPC_ENABLE_GET_ZCOPY' in os.environ)"
    )
    environment = {
        key: value for key, value in os.environ.items() if not key.startswith(("UCX_", "NIXL_"))
    } | {"NIXL_LOG_LEVEL": "ERROR"}
    ran = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == ["1024", "ERROR", "False"]


@pytest.mark.slow
def test_a_cancelled_read_has_not_ended_while_its_producer_may_still_wake_up_and_send() -> None:
    """NIXL releases the handle of such a read without an error, and the bytes arrive later, when
    the memory belongs to another request.
    """
    assert over_tcp("stopped_producer", "0.3") == {
        "ended_while_stopped": True,
        "ended": ["cancelled"],
        "stale_bytes": 0,
    }


@pytest.mark.slow
def test_a_producer_that_wakes_up_does_send_what_was_cancelled_as_long_as_somebody_waits() -> None:
    """The negative control of the test above: with a cancel timeout of 1000 s the same bytes do
    arrive, and the read does not end before.
    """
    told = over_tcp("stopped_producer", "1000")
    assert (told["ended_while_stopped"], told["ended"]) == (False, ["cancelled"])
    assert told["stale_bytes"] > 0


@pytest.mark.slow
def test_agents_that_were_thrown_away_leave_no_file_and_no_thread() -> None:
    told = over_tcp("silent_producers", "many_disposals")
    assert told == {
        "ended": 21,
        "errors": ["cancelled"],
        "held_more": True,
        "is_less_when_closed": True,
    }


@pytest.mark.slow
def test_a_silent_producer_fails_no_read_of_another_and_ends_after_those_that_were_under_way() -> (
    None
):
    told = over_tcp("silent_producers", "others_go_on")
    assert told == {
        "ended_early": 0,
        "told": ["slow", "lost"],
        "errors": [None, None, "cancelled"],
        "brought": [0, 9, 9],
    }


@pytest.mark.slow
def test_one_silent_producer_after_the_other_does_not_pile_up_agents() -> None:
    told = over_tcp("silent_producers", "bounded_generations")
    more_threads = told.pop("more_threads")
    assert told == {"ended_early": 0, "errors": [["None"], ["cancelled"]], "brought": [0, *[9] * 8]}
    assert max(more_threads) > 0
    assert more_threads[-4:] == [0, 0, 0, 0]


def over_tcp(program: str, argument: str) -> dict[str, Any]:
    ran = subprocess.run(
        [sys.executable, "-m", f"tests.transports.{program}", argument],
        env={**os.environ, "UCX_TLS": "tcp"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    told: dict[str, Any] = json.loads(ran.stdout)
    return told
