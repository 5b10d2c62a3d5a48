"""Tests which cached prefix several KV-cache groups can use together."""

from hypothesis import given
from hypothesis import strategies as st

from kvferry.connectors.contract import KVCacheGroup
from kvferry.engine.cache.prefix import find_prefix
from kvferry.protocol.tickets import NO_BLOCK

GROUPS = st.one_of(
    st.just(KVCacheGroup(())),
    st.builds(lambda size: KVCacheGroup((), sliding_window=size), st.integers(1, 20)),
    st.builds(lambda size: KVCacheGroup((), attention_chunk=size), st.integers(1, 20)),
)


class CountingIndex(dict[bytes, int]):
    lookups = 0

    def get(self, key: bytes, default: object = None) -> int | None:  # type: ignore[override]
        self.lookups += 1
        return super().get(key)


def is_usable(
    known: dict[bytes, int], group: KVCacheGroup, hashes: list[bytes], count: int, block_size: int
) -> bool:
    return all(
        hashes[index] in known
        for index in range(group.first_visible_token(count * block_size) // block_size, count)
    )


@given(
    st.lists(GROUPS, min_size=1, max_size=4),
    st.integers(0, 24),
    st.integers(1, 5),
    st.integers(0, 4),
    st.data(),
)
def test_the_longest_prefix_that_all_groups_can_use_is_found(
    groups: list[KVCacheGroup], num_blocks: int, block_size: int, tail: int, data: st.DataObject
) -> None:
    hashes = [b"%d" % index for index in range(num_blocks)]
    num_tokens = max(1, num_blocks * block_size + tail % block_size)
    hashes = hashes[: num_tokens // block_size]
    published = [
        CountingIndex(
            {h: 100 * number + i for i, h in enumerate(hashes) if data.draw(st.integers(0, 5))}
        )
        for number in range(len(groups))
    ]
    found = find_prefix(published, groups, hashes, num_tokens, block_size)

    most = (num_tokens - 1) // block_size
    usable = [
        count
        for count in range(most + 1)
        if all(
            is_usable(known, group, hashes, count, block_size)
            for known, group in zip(published, groups, strict=True)
        )
    ]
    assert found.num_blocks == usable[-1]
    for number, (group, table) in enumerate(zip(groups, found.tables, strict=True)):
        first = group.first_visible_token(found.num_blocks * block_size) // block_size
        assert table == [NO_BLOCK] * first + [
            100 * number + index for index in range(first, found.num_blocks)
        ]
    assert all(known.lookups <= len(hashes) for known in published), "each hash is looked for once"
    assert found.is_whole == (
        found.num_blocks < len(hashes)
        and found.num_blocks == most
        and all(hashes[most] in k for k in published)
    )


def test_a_window_needs_nothing_in_front_of_it() -> None:
    hashes = [b"a", b"b", b"c", b"d"]
    published = [dict(zip(hashes, range(4), strict=True)), {b"c": 12, b"d": 13}]
    groups = [KVCacheGroup(()), KVCacheGroup((), sliding_window=9)]
    assert find_prefix(published, groups, hashes, 17, 4).tables == (
        [0, 1, 2, 3],
        [NO_BLOCK, NO_BLOCK, 12, 13],
    )
    wider = [KVCacheGroup(()), KVCacheGroup((), sliding_window=10)]
    assert find_prefix(published, wider, hashes, 17, 4).num_blocks == 0
