"""Which child of a `MultiConnector` loads which tokens of a request.

Pure: the caller passes a function that asks a child, and `now` (local monotonic seconds).

A plan is one child alone, or a chain of children whose ranges follow each other:

    tokens   0 ....... n ............ S ................. N
             | cached  | child 0      | child 1           |
             | locally | asked with n | asked with S      |

The longest plan wins. Storage children are asked before peers, so that an engine fetches from a
peer only what its own tiers lack.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
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
    None while a child that may still change the plan has no answer.
    """
    real = [child for child in children if not child.provides_dummy_kv]
    chained = [child for child in real if child.honours_token_range]
    best, is_pending, has_chained = LoadPlan(), False, False
    for child in real:
        if _is_whole(best, num_local, num_tokens):
            break
        if child.honours_token_range and has_chained:
            continue
        has_chained = has_chained or child.honours_token_range
        group = chained if child.honours_token_range else [child]
        plan = _find_chain(group, ask, num_local, num_tokens, block_size)
        if plan is None:
            is_pending = True
        elif plan.num_tokens > best.num_tokens:
            best = plan
    if is_pending and not _is_whole(best, num_local, num_tokens):
        return None
    # Dummy KV is never mixed with real KV, and real KV is preferred.
    dummies = [child for child in children if child.provides_dummy_kv]
    if best.ranges or not dummies:
        return best
    return _find_first(dummies, ask, num_local, num_tokens)


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


def _find_first(
    children: Iterable[ChildTraits], ask: Ask, num_local: int, num_tokens: int
) -> LoadPlan | None:
    is_pending = False
    for child in children:
        count, is_async = ask(child.index, num_local)
        is_pending = is_pending or count is None
        count = min(count or 0, num_tokens - num_local)
        if count > 0:
            part = TokenRange(child.index, num_local, num_local + count)
            return LoadPlan((part,), is_async)
    return None if is_pending else LoadPlan()


def _is_whole(plan: LoadPlan, num_local: int, num_tokens: int) -> bool:
    return bool(plan.ranges) and num_local + plan.num_tokens >= num_tokens - 1


@dataclass(slots=True)
class PendingLookups:
    """Since when each child has had no answer for a request. After `timeout_s` the child counts as
    having nothing to load, so that no child can keep a request waiting for ever.
    """

    timeout_s: float
    _since: dict[str, dict[int, float]] = field(default_factory=dict, init=False)

    def note_pending(self, request: str, child: int, now: float) -> bool:
        """Note that a child has no answer yet; True if the child has run out of time."""
        since = self._since.setdefault(request, {}).setdefault(child, now)
        return now - since >= self.timeout_s

    def note_answer(self, request: str, child: int, now: float) -> float:
        """Note an answer; returns for how many seconds the request waited for it."""
        return now - self._since.get(request, {}).pop(child, now)

    def end(self, request: str) -> None:
        """Forget a request that the engine has admitted or that has ended."""
        self._since.pop(request, None)

    def __len__(self) -> int:
        return len(self._since)
