"""Tests that copies which share a block run one after the other, in the order of the requests, and
that all other copies run concurrently.
"""

from hypothesis import given
from hypothesis import strategies as st

from kvferry.protocol.producer.host_buffers import HostCopyQueue


def test_of_two_that_share_a_block_the_later_begins_when_the_earlier_has_ended() -> None:
    turns = HostCopyQueue()
    assert turns.join(1, {3, 4})
    assert not turns.join(2, {4, 5})
    assert turns.join(3, {6})
    assert not turns.join(4, {5})
    assert turns.leave(3) == []
    assert turns.leave(1) == [2]
    assert turns.leave(2) == [4]


def test_one_that_is_not_wanted_any_more_gives_its_place_away() -> None:
    turns = HostCopyQueue()
    turns.join(1, {3})
    turns.join(2, {3, 4})
    turns.join(3, {4})
    assert turns.leave(2) == [3]
    assert turns.has_any({3})
    assert turns.leave(1) == []
    assert (turns.has_any({3}), turns.has_any({4}), turns.has_any(())) == (False, True, False)


@given(
    st.lists(
        st.tuples(st.frozensets(st.integers(0, 5), max_size=4), st.booleans(), st.integers(0, 30)),
        max_size=30,
    )
)
def test_whatever_is_asked_for_no_two_write_the_same_block_at_once_and_all_have_their_turn(
    story: list[tuple[frozenset[int], bool, int]],
) -> None:
    turns = HostCopyQueue()
    wanted: dict[int, frozenset[int]] = {}
    begun: set[int] = set()

    def leave(copy: int) -> None:
        del wanted[copy]
        begun.discard(copy)
        begun.update(turns.leave(copy))

    for number, (blocks, leaves, which) in enumerate(story):
        wanted[number] = blocks
        if turns.join(number, blocks):
            begun.add(number)
        if leaves and wanted:
            leave(sorted(wanted)[which % len(wanted)])
        assert begun == {copy for copy in wanted if turns.is_running(copy)}
        assert all(not wanted[a] & wanted[b] for a in begun for b in begun if a < b)
        assert all(
            wanted[copy] & wanted[earlier]
            for copy in wanted.keys() - begun
            for earlier in [_blocker(wanted, copy)]
        )
    while wanted:
        assert begun, "somebody is always first"
        leave(min(begun))
    assert len(turns) == 0


def _blocker(wanted: dict[int, frozenset[int]], copy: int) -> int:
    """Return the earliest copy before `copy` that shares a block with it; one must exist."""
    return next(other for other in sorted(wanted) if other < copy and wanted[other] & wanted[copy])
