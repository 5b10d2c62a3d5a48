"""Which child of a `MultiConnector` loads which tokens of a request.

Pure: the caller passes a function that asks a child.

A plan is one child alone, or a chain of children whose ranges follow each other:

    tokens   0 ....... n ............ S ................. N
             | cached  | child 0      | child 1           |
             | locally | asked with n | asked with S      |

The longest plan wins. Storage children are asked before peers, so that an engine fetches from a
peer only what its own tiers lack.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

Ask = Callable[[int, int], tuple[int | None, bool]]
"""Asks the child with this index how many tokens it can load beyond the given number of computed
tokens, and whether it loads between steps.
"""


@dataclass(frozen=True, slots=True)
class ChildTraits:
    """The properties of a child that decide how it may be combined with others."""

    index: int
    """The position in the configuration, which is the order of preference."""
    honours_token_range: bool = False
    loads_are_optional: bool = False
    provides_dummy_kv: bool = False
    reports_failed_blocks: bool = False
    """The child names the blocks of a failed load between steps, not the request."""
    follows_lookups: bool = False
    """The child learns of a request when it is asked what it can load, and keeps the block ids of
    the calls that follow. So the child must be asked about every request, and asked again about a
    request that starts over with other blocks.
    """
    store_timeouts_are_harmless: bool = False
    """After a `TimeoutError` of any call, the child touches no block for that call any more."""
    names_kv_by_tokens_only: bool = False
    """The child would give a request the KV of another adapter or salt, so it is not told of
    requests that have one.
    """
    needs_polling: bool = False
    """The child cannot wake the engine when a transfer has ended."""


@dataclass(frozen=True, slots=True)
class TokenRange:
    """The tokens `[start, end)` of a request that one child loads."""

    child: int
    start: int
    end: int

    @property
    def num_tokens(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """The ranges that children load for one request, in order and without gaps."""

    ranges: tuple[TokenRange, ...] = ()
    is_async: bool = False

    def __post_init__(self) -> None:
        assert all(a.end == b.start for a, b in pairwise(self.ranges))

    @property
    def num_tokens(self) -> int:
        return sum(part.num_tokens for part in self.ranges)

    def first(self, num_tokens: int) -> "LoadPlan":
        """The part of the plan that loads its first `num_tokens` tokens."""
        ranges, left = [], num_tokens
        for part in self.ranges:
            taken = min(part.num_tokens, left)
            if taken > 0:
                ranges.append(TokenRange(part.child, part.start, part.start + taken))
            left -= taken
        return LoadPlan(tuple(ranges), self.is_async and bool(ranges))


def find_plan(
    children: Sequence[ChildTraits], ask: Ask, num_local: int, num_tokens: int, block_size: int
) -> LoadPlan | None:
    """The longest plan for a request of `num_tokens` tokens, of which the engine has `num_local`;
    None while a child that may still change the plan has no answer. Dummy KV is never mixed with
    real KV, and real KV is preferred.
    """
    real = [child for child in children if not child.provides_dummy_kv]
    plan = _find_longest(real, ask, num_local, num_tokens, block_size)
    if plan is None or plan.ranges:
        return plan
    dummies = [child for child in children if child.provides_dummy_kv]
    return _find_longest(dummies, ask, num_local, num_tokens, block_size)


def _find_longest(
    children: Sequence[ChildTraits], ask: Ask, num_local: int, num_tokens: int, block_size: int
) -> LoadPlan | None:
    # The chain has the place of its first child.
    groups: dict[int | None, list[ChildTraits]] = {}
    for child in children:
        groups.setdefault(None if child.honours_token_range else child.index, []).append(child)
    best, is_pending = LoadPlan(), False
    for group in groups.values():
        plan = _find_chain(group, ask, num_local, num_tokens, block_size)
        if plan is None:
            is_pending = True
        elif plan.num_tokens > best.num_tokens:
            best = plan
        if best.ranges and num_local + best.num_tokens >= num_tokens - 1:
            return best
    return None if is_pending else best


def _find_chain(
    children: Iterable[ChildTraits], ask: Ask, num_local: int, num_tokens: int, block_size: int
) -> LoadPlan | None:
    """The plan in which each child continues where the child before it ends."""
    ranges: list[TokenRange] = []
    end, is_async, is_pending = num_local, False, False
    for child in sorted(children, key=lambda child: not child.loads_are_optional):
        # An engine computes the last token itself, so loading that token alone saves nothing; and
        # no child can start inside a block that another child fills.
        if end >= num_tokens or (ranges and (end >= num_tokens - 1 or end % block_size)):
            break
        if is_pending and not child.loads_are_optional:
            # Where a peer has to begin is not known yet. Other storage children are still asked,
            # because asking may start a lookup.
            break
        count, child_is_async = ask(child.index, end)
        if count is None:
            is_pending = True
            continue
        count = min(count, num_tokens - end)
        if count <= 0 or (ranges and child_is_async != is_async):
            continue
        ranges.append(TokenRange(child.index, end, end + count))
        end, is_async = end + count, child_is_async
    return None if is_pending else LoadPlan(tuple(ranges), is_async)
