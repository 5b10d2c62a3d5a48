"""A scheduler's environment for tests: a connector that follows a script, and workers whose cache
records what was really written.

Every cache cell holds a digest of its group and of the whole prefix up to its token. A block that
is wrongly shared, reused or published is therefore detected at the next read. The next token is a
function of that digest, so outputs can be predicted.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

from kvferry.connectors.contract import (
    KVCacheBlocks,
    KVCacheGroup,
    KVConnectorMetadata,
    KVConnectorOutput,
    Request,
    SchedulerSide,
)
from kvferry.connectors.nixl.tables import RetainedTurns
from kvferry.engine.limits import SchedulerLimits
from kvferry.engine.messages import (
    AddRequest,
    RequestOutput,
    SampledToken,
    SamplingParams,
    StepPlan,
    StepResult,
)
from kvferry.engine.scheduler import Scheduler
from kvferry.protocol.tickets import NO_BLOCK
from kvferry.types import RequestId

GARBAGE = -1
VOCAB = 50
PROMPT = list(range(1, 11))
FULL = KVCacheGroup(("full",))


def window(size: int) -> KVCacheGroup:
    return KVCacheGroup((f"window{size}",), sliding_window=size)


@dataclass
class Script:
    """What the connector reports about one request."""

    available_tokens: int | None = 0
    """Number of leading prompt tokens that can be loaded; None if not known yet."""
    is_async: bool = True
    is_delayed: bool = False
    is_soft: bool = False
    """The connector retains the request's blocks for a reader that may come, and evicts them when
    asked.
    """
    params: dict[str, Any] | None = None


@dataclass
class Load:
    request: Request
    tables: tuple[list[int], ...]
    start: int
    end: int


class ScriptedConnector(SchedulerSide):
    def __init__(self) -> None:
        self.scripts: dict[str, Script] = {}
        self.calls: list[tuple[str, str, int]] = []
        """Every call in order, as (method, request id, number of tokens or blocks)."""
        self.loads: dict[str, Load] = {}
        self.newly_sending: list[tuple[str, tuple[list[int], ...]]] = []
        self.has_block_frees = False
        self.kept = RetainedTurns()
        self.leaving: list[str] = []
        """Evicted requests whose blocks are not free yet; a test ends them."""

    def times(self, method: str, request_id: str) -> int:
        return sum(call[:2] == (method, request_id) for call in self.calls)

    def on_new_request(self, request: Request) -> None:
        self.calls.append(("on_new_request", request.request_id, request.num_tokens))

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        script = self.scripts.get(request.request_id, Script())
        self.calls.append(("get_num_new_matched_tokens", request.request_id, num_computed_tokens))
        if script.available_tokens is None:
            return None, False
        count = max(0, script.available_tokens - num_computed_tokens)
        return count, script.is_async and count > 0

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        self.calls.append(("update_state_after_alloc", request.request_id, num_external_tokens))
        if num_external_tokens:
            end = self.calls_end(request.request_id)
            self.loads[request.request_id] = Load(
                request, blocks.get_block_ids(), end, end + num_external_tokens
            )

    def calls_end(self, request_id: str) -> int:
        """The number of local tokens in the last `get_num_new_matched_tokens` call of a request."""
        return next(
            n
            for method, rid, n in reversed(self.calls)
            if (method, rid) == ("get_num_new_matched_tokens", request_id)
        )

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def has_pending_block_frees(self) -> bool:
        return self.has_block_frees or self.kept.has_evicting

    def reclaim_blocks(self, num_blocks: int) -> None:
        self.leaving += self.kept.evict(num_blocks)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        for request_id in connector_output.finished_sending:
            self.kept.end(RequestId(request_id))
            if request_id in self.leaving:
                self.leaving.remove(request_id)

    def request_finished_all_groups(
        self, request: Request, tables: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self.calls.append(("request_finished", request.request_id, len(tables[0])))
        script = self.scripts.get(request.request_id, Script())
        if script.is_delayed:
            self.newly_sending.append((request.request_id, tables))
        if script.is_delayed and script.is_soft:
            self.kept.retain(
                RequestId(request.request_id),
                sum(block != NO_BLOCK for table in tables for block in table),
                "",
            )
        return script.is_delayed, script.params

    def request_abandoned(self, request_id: str) -> None:
        self.calls.append(("request_abandoned", request_id, 0))


def extend_digest(digest: int, token: int) -> int:
    return crc32(token.to_bytes(4), digest)


def digests(tokens: Iterable[int], salt: str = "") -> list[int]:
    """The digests that a correct cache holds, one per token."""
    digest, found = crc32(salt.encode()), []
    for token in tokens:
        digest = extend_digest(digest, token)
        found.append(digest)
    return found


def marked(digest: int, group: int) -> int:
    return digest * 16 + group


def predict(request: AddRequest) -> list[int]:
    """The output of an undisturbed engine that samples no end-of-sequence token."""
    tokens = list(request.prompt_token_ids)
    for _ in range(request.sampling.max_tokens):
        tokens.append(digests(tokens, request.cache_salt)[-1] % VOCAB)
    return tokens[len(request.prompt_token_ids) :]


def make_request(
    request_id: str, tokens: Iterable[int], max_tokens: int = 3, salt: str = ""
) -> AddRequest:
    return AddRequest(
        request_id,
        list(tokens),
        SamplingParams(max_tokens=max_tokens, ignore_eos=True),
        cache_salt=salt,
    )


@dataclass
class Rig:
    """A scheduler, its connector, and workers whose cache holds digests. `step` is one tick of the
    core's loop.
    """

    limits: SchedulerLimits
    has_connector: bool = True
    cells: dict[tuple[int, int], int] = field(default_factory=dict)
    outputs: dict[str, list[int]] = field(default_factory=dict)
    last: dict[str, RequestOutput] = field(default_factory=dict)
    requests: dict[str, AddRequest] = field(default_factory=dict)
    news: KVConnectorOutput = field(default_factory=KVConnectorOutput)
    plan: StepPlan = field(default_factory=lambda: StepPlan(0))
    lent: dict[str, list[tuple[int, dict[int, int]]]] = field(default_factory=dict)
    """Contents of the blocks of each delayed free, recorded when the delay began: they must not
    change while a peer may read them.
    """
    producer_block_size: int = 1
    """The producer's block size. The producer has freed whole blocks of this size that its window
    no longer needs, so their tokens cannot be loaded.
    """

    def __post_init__(self) -> None:
        self.connector = ScriptedConnector()
        self.scheduler = Scheduler(self.limits, self.connector if self.has_connector else None)

    # -- requests --

    def add(self, request: AddRequest, script: Script | None = None) -> None:
        self.connector.scripts[request.request_id] = script or Script()
        self.requests[request.request_id] = request
        refusal = self.scheduler.add(request)
        if refusal is not None:
            self.last[request.request_id] = refusal

    def abort(self, request_id: str) -> None:
        self.scheduler.abort(request_id)
        self._remember_lent()

    @property
    def is_at_rest(self) -> bool:
        return not self.scheduler.wants_step and self.news == KVConnectorOutput()

    def run(self, max_steps: int = 500) -> None:
        """Step until the scheduler wants no step and the connector has no news."""
        for _ in range(max_steps):
            if self.is_at_rest:
                return
            self.step()
        raise AssertionError("the scheduler does not come to rest")

    def tokens_of(self, request_id: str) -> list[int]:
        return self.outputs.get(request_id, [])

    def is_done(self, request_id: str) -> bool:
        return request_id in self.last

    # -- transfers --

    def end_load(self, request_id: str, failure: str | None = None) -> None:
        """End the transfer of a request; unless it failed, its bytes are right."""
        load = self.connector.loads.pop(request_id)
        if failure is None:
            tokens, salt = load.request.all_token_ids, load.request.cache_salt or ""
            for number, group in enumerate(self.limits.groups):
                seen = (
                    group.first_visible_token(min(load.end, load.request.num_tokens - 1))
                    if group.has_local_attention
                    else 0
                )
                start = max(load.start, seen // self.producer_block_size * self.producer_block_size)
                self._write(number, load.tables[number], tokens, start, load.end, salt)
        else:
            self.news.failed_recving.add(request_id)
            self.news.failure_reasons[request_id] = failure
        self.news.finished_recving.add(request_id)

    def end_sending(self, request_id: str) -> None:
        for block, cells in self.lent.pop(request_id):
            assert cells == self._block(block), f"block {block} changed while a peer could read it"
        self.news.finished_sending.add(request_id)

    # -- one step --

    def step(self) -> StepPlan:
        self.plan = plan = self.scheduler.schedule()
        self._scribble()
        tokens = {
            part.request_id: token
            for part in plan.slices
            if (token := self._compute(part)) is not None
        }
        news, self.news = self.news, KVConnectorOutput()
        outputs = self.scheduler.update(
            plan, StepResult(tokens, news if self.has_connector else None)
        )
        self._remember_lent()
        for output in outputs:
            self.outputs.setdefault(output.request_id, []).extend(
                token.token_id for token in output.tokens
            )
            assert output.request_id not in self.last, "an output after the last one"
            if output.finish_reason is not None:
                self.last[output.request_id] = output
        self.scheduler.check()
        return plan

    def _remember_lent(self) -> None:
        for request_id, tables in self.connector.newly_sending:
            self.lent[request_id] = [
                (block, self._block(block))
                for table in tables
                for block in table
                if block != NO_BLOCK
            ]
        self.connector.newly_sending.clear()

    def _compute(self, part: Any) -> SampledToken | None:
        request = self.requests[part.request_id]
        known = [*request.prompt_token_ids, *self.tokens_of(part.request_id)]
        end = part.start + len(part.token_ids)
        assert tuple(known[part.start : end]) == part.token_ids
        right = digests(known[:end], request.cache_salt)
        for number, table in enumerate(part.block_ids):
            self._compute_group(number, table, part, known, request.cache_salt)
        if part.sampling is None:
            return None
        assert end == len(known)
        return SampledToken(right[-1] % VOCAB)

    def _compute_group(
        self, number: int, table: Any, part: Any, known: list[int], salt: str
    ) -> None:
        end, block_size = part.start + len(part.token_ids), self.limits.block_size
        seen = self.limits.groups[number].first_visible_token(part.start)
        first = seen // block_size
        assert set(table[:first]) <= {NO_BLOCK}, (
            f"{part.request_id} keeps blocks that nobody looks at"
        )
        assert NO_BLOCK not in table[first:], f"{part.request_id} lacks blocks that it looks at"
        lent = {block for blocks in self.lent.values() for block, _ in blocks}
        assert lent.isdisjoint(table[part.start // block_size :]), (
            f"{part.request_id} writes into blocks that a peer may read"
        )
        self._write(number, table, known, part.start, end, salt)
        read = [self.cells.get(self._cell(table, position)) for position in range(seen, end)]
        right = [marked(digest, number) for digest in digests(known[:end], salt)[seen:]]
        assert read == right, f"{part.request_id} reads KV that is not its own"

    def _scribble(self) -> None:
        """Overwrites the blocks of every load in progress: such a load may have written anything
        there.
        """
        for load in self.connector.loads.values():
            for table in load.tables:
                self._fill(table, range(load.start, load.end), lambda _: GARBAGE)

    def _write(self, number: int, table: Any, tokens: Any, start: int, end: int, salt: str) -> None:
        right = digests(tokens[:end], salt)
        self._fill(table, range(start, end), lambda position: marked(right[position], number))

    def _fill(self, table: Any, positions: range, value: Callable[[int], int]) -> None:
        for position in positions:
            block, offset = self._cell(table, position)
            if block != NO_BLOCK:
                self.cells[block, offset] = value(position)

    def _cell(self, table: Any, position: int) -> tuple[int, int]:
        return table[position // self.limits.block_size], position % self.limits.block_size

    def _block(self, block: int) -> dict[int, int]:
        return {
            offset: self.cells.get((block, offset), 0) for offset in range(self.limits.block_size)
        }


def make_limits(**changes: Any) -> SchedulerLimits:
    settings: Mapping[str, Any] = {
        "num_blocks": 16,
        "block_size": 4,
        "max_model_len": 64,
        "vocab_size": VOCAB,
        "max_num_batched_tokens": 16,
        "max_num_seqs": 4,
        "groups": (FULL,),
    }
    return SchedulerLimits(**{**settings, **changes})


def assert_quiescent(rig: Rig) -> None:
    """No block is in use, no request waits, and the connector was notified of each request's end
    exactly once.
    """
    status = rig.scheduler.status()
    assert (status.num_running, status.num_waiting, status.num_waiting_for_remote_kvs) == (0, 0, 0)
    assert (status.num_used_blocks, status.num_delayed_frees) == (0, 0)
    rig.scheduler.check()
    if rig.has_connector:
        for request_id in rig.requests:
            assert rig.connector.times("request_finished", request_id) == rig.connector.times(
                "on_new_request", request_id
            )
