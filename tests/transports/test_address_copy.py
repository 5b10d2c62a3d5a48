"""Tests copies between addresses of this process, in host memory."""

import numpy as np
import pytest

from kvferry.errors import TransportError
from kvferry.transports.copy.gather import AddressCopies, HostAddressCopier

SIZE = 64 * 1024


@pytest.mark.parametrize("size_bytes", [1, 7, 16, 999, 4096])
def test_every_segment_arrives_and_nothing_else_is_touched(size_bytes: int) -> None:
    random = np.random.default_rng(size_bytes)
    source, target = (random.integers(0, 256, SIZE, dtype=np.uint8) for _ in range(2))
    before = target.copy()
    slots = SIZE // size_bytes
    count = min(slots // 2, 500)
    sources, targets = (
        random.permutation(slots)[:count].astype(np.int64) * size_bytes for _ in range(2)
    )
    expected = target.copy()
    for origin, to in zip(sources.tolist(), targets.tolist(), strict=True):
        expected[to : to + size_bytes] = source[origin : origin + size_bytes]
    part = AddressCopies(size_bytes, sources, targets, (source.ctypes.data,), (target.ctypes.data,))
    assert HostAddressCopier().start([part]).is_done()
    assert np.array_equal(target, expected)
    assert not np.array_equal(expected, before), "the control: nothing was asked for"


def test_addresses_may_be_given_whole_or_from_a_base() -> None:
    source, target = np.arange(64, dtype=np.uint8), np.zeros(64, np.uint8)
    offsets = np.array([0, 32], np.int64)
    HostAddressCopier().start(
        [AddressCopies(8, source.ctypes.data + offsets, target.ctypes.data + offsets)]
    )
    assert target.nonzero()[0].tolist() == [*range(1, 8), *range(32, 40)]


def test_the_same_offsets_may_stand_for_several_places() -> None:
    source, target = np.arange(64, dtype=np.uint8), np.zeros(64, np.uint8)
    first, last = np.array([0, 8], np.int64), np.array([8, 0], np.int64)
    sources, targets = (
        tuple(memory.ctypes.data + at for at in (0, 48)) for memory in (source, target)
    )
    HostAddressCopier().start([AddressCopies(8, first, last, sources, targets)])
    expected = np.concatenate(
        [source[8:16], source[:8], np.zeros(32, np.uint8), source[56:], source[48:56]]
    )
    assert target.tolist() == expected.tolist()


def test_some_rows_are_a_view_of_all() -> None:
    part = AddressCopies(
        8, np.arange(10, dtype=np.int64), np.arange(10, dtype=np.int64), (100, 300), (200, 400)
    )
    some = part.rows(3, 5)
    assert (some.sources.tolist(), some.targets.tolist(), some.source_bases, some.target_bases) == (
        [3, 4],
        [3, 4],
        (100, 300),
        (200, 400),
    )
    assert part.rows(0, 99) is part


def test_nothing_is_nothing() -> None:
    empty = np.empty(0, np.int64)
    assert (
        HostAddressCopier()
        .start([AddressCopies(8, empty, empty), AddressCopies(0, empty + 1, empty + 1)])
        .is_done()
    )


@pytest.mark.parametrize(
    ("sources", "targets"), [([0, 57], [0, 8]), ([0, 8], [0, 57]), ([-1, 0], [0, 8])]
)
def test_what_leaves_its_region_is_not_copied(sources: list[int], targets: list[int]) -> None:
    memory = np.arange(64, dtype=np.uint8)
    bases = memory.ctypes.data, memory.ctypes.data
    part = AddressCopies(
        8,
        np.array(sources, np.int64),
        np.array(targets, np.int64),
        (bases[0],),
        (bases[1],),
        source_last=56,
        target_last=56,
    )
    with pytest.raises(TransportError, match="leaves its region"):
        HostAddressCopier().start([part])
    assert memory.tolist() == list(range(64))
