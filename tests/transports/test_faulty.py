"""Tests that `FaultyTransport` causes exactly the requested faults, and that unknown fault specs
are refused.
"""

import numpy as np
import pytest

from kvferry.errors import ConfigError
from kvferry.transports.base import Completion, DataTransport, Segments
from kvferry.transports.faulty import Faults, FaultyTransport, parse_faults
from kvferry.transports.memory import MemoryNetwork, MemoryTransport
from kvferry.types import EngineId, Epoch, PeerId, Region

PEER = PeerId(EngineId("far"), Epoch("1"), 0)


@pytest.mark.parametrize(
    ("text", "faults"),
    [
        ("", Faults()),
        ("corrupt:every=1", Faults(corrupt_every=1)),
        ("corrupt:every=1;corrupt:regions=conv", Faults(corrupt_every=1, corrupt_regions="conv")),
        ("fail:every=3", Faults(fail_every=3)),
        (" delay:polls=5 ; corrupt:every=2", Faults(corrupt_every=2, delay_polls=5)),
    ],
)
def test_specs_mean_what_they_say(text: str, faults: Faults) -> None:
    assert parse_faults(text) == faults


@pytest.mark.parametrize(
    "text",
    [
        "corrupt",
        "corrupt:every",
        "corrupt:regions=",
        "corrupt:every=0",
        "corrupt:every=-1",
        f"corrupt:every={'9' * 5000}",
        "corrupt:every=１",
        "corrupt:polls=1",
        "burn:every=1",
        "x",
        "fail:every=²",
    ],
)
def test_other_specs_are_refused_with_those_there_are(text: str) -> None:
    with pytest.raises(ConfigError, match="corrupt:every=N"):
        parse_faults(text)


def read_twelve(faults: Faults, fill: int | None = None) -> tuple[list[bool], list[bool]]:
    """Make twelve reads of 2 x 3 segments; return which succeeded, and which bytes are right."""
    network = MemoryNetwork()
    memories = [
        np.zeros(4096, np.uint8),
        np.random.default_rng(0).integers(0, 256, 4096, dtype=np.uint8),
    ]
    if fill is not None:
        memories[1][:] = fill
    transports: list[DataTransport] = [
        FaultyTransport(MemoryTransport(network), faults),
        MemoryTransport(network),
    ]
    regions = [[Region("kv", memory.ctypes.data, 64, 64, 64)] for memory in memories]
    for transport, region in zip(transports, regions, strict=True):
        assert transport.register(region)
    transports[0].connect(PEER, transports[1].offer(), regions[1])
    offsets = np.array([64, 256, 512], np.int64)
    ended_well, arrived = [], []
    for _ in range(12):
        handle = transports[0].read(
            PEER,
            [
                Segments(0, 0, 64, offsets, offsets),
                Segments(0, 0, 64, offsets + 2048, offsets + 2048),
            ],
        )
        completions: list[Completion] = []
        polls = 0
        while not completions and polls < 100:
            completions = transports[0].poll()
            polls += 1
        assert polls > faults.delay_polls
        assert [completion.handle for completion in completions] == [handle]
        ended_well.append(completions[0].ok)
        here, there = (memory.reshape(64, 64) for memory in memories)
        wrong = [
            row * 64
            for row in range(64)
            if here[row].any() and not np.array_equal(here[row], there[row])
        ]
        assert wrong in ([], [64, 2048 + 64])
        arrived.append(not wrong)
        memories[0][:] = 0
    return ended_well, arrived


def test_without_faults_all_is_well() -> None:
    assert read_twelve(Faults()) == ([True] * 12, [True] * 12)


def test_every_third_read_has_the_first_segment_of_each_region_wrong() -> None:
    assert read_twelve(Faults(corrupt_every=3)) == ([True] * 12, [True, True, False] * 4)


def test_constant_bytes_are_corrupted_too() -> None:
    assert read_twelve(Faults(corrupt_every=1), fill=7)[1] == [False] * 12


def test_every_fourth_transfer_fails() -> None:
    assert read_twelve(Faults(fail_every=4))[0] == [True, True, True, False] * 3


def test_completions_come_late() -> None:
    assert read_twelve(Faults(delay_polls=6)) == ([True] * 12, [True] * 12)
