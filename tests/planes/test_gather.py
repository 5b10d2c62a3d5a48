"""Whatever the offsets look like, exactly the named bytes are copied, in bounded slices."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.planes.gather import SLICE_BYTES, Direction, RegionCopy, Stage
from kvferry.ports.data import Pieces

STAGE = Stage()


def expected_after(part: Pieces, local: np.ndarray, remote: np.ndarray, direction: Direction) -> np.ndarray:
    target, source = (local.copy(), remote) if direction is Direction.READ else (remote.copy(), local)
    for near, far in zip(part.local_offsets.tolist(), part.remote_offsets.tolist(), strict=True):
        to, origin = (near, far) if direction is Direction.READ else (far, near)
        target[to : to + part.piece_bytes] = source[origin : origin + part.piece_bytes]
    return target


@settings(deadline=None)
@given(st.data(), st.sampled_from(Direction), st.sampled_from([1, 3, 64, 4096]), st.integers(0, 3))
def test_exactly_the_named_bytes_are_copied(data: st.DataObject, direction: Direction, piece_bytes: int, skew: int) -> None:
    slots = 60
    size = (slots + 1) * piece_bytes + 3
    local, remote = (np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8) for seed in (1, 2))
    count = data.draw(st.integers(0, slots))
    near = np.array(data.draw(st.permutations(range(slots)))[:count], np.int64) * piece_bytes + skew
    far = np.array(data.draw(st.permutations(range(slots)))[:count], np.int64) * piece_bytes
    if data.draw(st.booleans()):
        near = np.sort(near)
    part = Pieces(0, 0, piece_bytes, near, far)
    expected = expected_after(part, local, remote, direction)
    moved = list(RegionCopy(part, local, remote, direction, STAGE).slices())
    assert np.array_equal(local if direction is Direction.READ else remote, expected)
    assert sum(size for size, _ in moved) == part.total_bytes


@pytest.mark.parametrize("piece_bytes", [4096, 16384, 65536, 8 * 1024 * 1024])
@pytest.mark.parametrize("shape", ["scattered", "to runs", "neighbours"])
def test_every_slice_is_bounded(piece_bytes: int, shape: str) -> None:
    slots = 3 * SLICE_BYTES // min(piece_bytes, SLICE_BYTES)
    random = np.random.default_rng(0)
    near = np.arange(slots, dtype=np.int64) * piece_bytes
    far = near if shape == "neighbours" else random.permutation(near)
    near = random.permutation(near) if shape == "scattered" else near
    local, remote = np.zeros(slots * piece_bytes, np.uint8), random.integers(0, 256, slots * piece_bytes, dtype=np.uint8)
    part = Pieces(0, 0, piece_bytes, near, far)
    sizes = [size for size, _ in RegionCopy(part, local, remote, Direction.READ, STAGE).slices()]
    assert max(sizes) <= SLICE_BYTES
    assert len(sizes) >= 3
    rows = local.reshape(slots, piece_bytes)
    assert np.array_equal(rows[near // piece_bytes], remote.reshape(slots, piece_bytes)[far // piece_bytes])
