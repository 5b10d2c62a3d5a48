"""A scheduler's surroundings for tests: a connector that answers as told, and workers whose cache remembers what was really written.

Every cell of the cache holds a digest of the whole prefix up to its token, so a block that is shared, reused or published wrongly is
noticed at the next read, and the next token is a function of that digest, so outputs can be predicted.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

from kvferry.config import KVTransferConfig, SideChannelConfig
from kvferry.config.transfer import KVRole
from kvferry.connectors.contract import (
    ConnectorConfig,
    KVCacheBlocks,
    KVCacheConfig,
    KVCacheGroup,
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorOutput,
    KVConnectorRole,
    ModelIdentity,
    ParallelConfig,
    Request,
)
from kvferry.engine.limits import Limits
from kvferry.engine.messages import AddRequest, RequestOutput
from kvferry.engine.scheduler import Scheduler
from kvferry.engine.step import SampledToken, SamplingParams, StepPlan, StepResult
from kvferry.testing.local_kit import LocalKit

GARBAGE = -1
VOCAB = 50
PROMPT = list(range(1, 11))


@dataclass
class Script:
    """What the connector says of one request."""

    available_tokens: int | None = 0
    """Leading tokens of the prompt that can be loaded; None: not known yet."""
    is_async: bool = True
    is_delayed: bool = False
    params: dict[str, Any] | None = None


@dataclass
class Load:
    request: Request
    block_ids: list[int]
    start: int
    end: int


class ScriptedConnector(KVConnectorBase_V1):
    def __init__(self, config: ConnectorConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(config, role, kv_cache_config)
        self.scripts: dict[str, Script] = {}
        self.calls: list[tuple[str, str, int]] = []
        """(method, request, number) in order."""
        self.loads: dict[str, Load] = {}
        self.sending: dict[str, list[int]] = {}
        self.newly_sending: list[tuple[str, list[int]]] = []
        self.has_block_frees = False

    def times(self, method: str, request_id: str) -> int:
        return sum(call[:2] == (method, request_id) for call in self.calls)

    def on_new_request(self, request: Request) -> None:
        self.calls.append(("on_new_request", request.request_id, request.num_tokens))

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        script = self.scripts.get(request.request_id, Script())
        self.calls.append(("get_num_new_matched_tokens", request.request_id, num_computed_tokens))
        if script.available_tokens is None:
            return None, False
        count = max(0, script.available_tokens - num_computed_tokens)
        return count, script.is_async and count > 0

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        self.calls.append(("update_state_after_alloc", request.request_id, num_external_tokens))
        if num_external_tokens:
            (block_ids,) = blocks.get_block_ids()
            end = self.calls_end(request.request_id)
            self.loads[request.request_id] = Load(request, block_ids, end, end + num_external_tokens)

    def calls_end(self, request_id: str) -> int:
        """The local tokens named at the last question about a request."""
        return next(n for method, rid, n in reversed(self.calls) if (method, rid) == ("get_num_new_matched_tokens", request_id))

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def has_pending_block_frees(self) -> bool:
        return self.has_block_frees

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self.calls.append(("request_finished", request.request_id, len(block_ids)))
        script = self.scripts.get(request.request_id, Script())
        if script.is_delayed:
            self.newly_sending.append((request.request_id, block_ids))
        return script.is_delayed, script.params

    def request_abandoned(self, request_id: str) -> None:
        self.calls.append(("request_abandoned", request_id, 0))

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        raise NotImplementedError

    def wait_for_layer_load(self, layer_name: str) -> None:
        raise NotImplementedError

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        raise NotImplementedError

    def wait_for_save(self) -> None:
        raise NotImplementedError


def make_connector(limits: Limits) -> ScriptedConnector:
    config = ConnectorConfig(
        kv_transfer=KVTransferConfig(kv_connector="Scripted", kv_role=KVRole.BOTH, kv_connector_module_path="tests.engine.scripted"),
        model=ModelIdentity("Scripted", "0", 1, 1, 8, "float32"),
        parallel=ParallelConfig(),
        side_channel=SideChannelConfig(),
        secret=b"s" * 32,
        epoch="epoch",
        kit=LocalKit(),
    )
    cache = KVCacheConfig(limits.num_blocks, limits.block_size, (KVCacheGroup(("layer",)),), "HND", 1, 8, "float32")
    return ScriptedConnector(config, KVConnectorRole.SCHEDULER, cache)


def extend_digest(digest: int, token: int) -> int:
    return crc32(token.to_bytes(4), digest)


def digests(tokens: Iterable[int], salt: str = "") -> list[int]:
    """What the cache holds for each token when all before it are right."""
    digest, found = crc32(salt.encode()), []
    for token in tokens:
        digest = extend_digest(digest, token)
        found.append(digest)
    return found


def predict(request: AddRequest) -> list[int]:
    """The output of an undisturbed engine (no end-of-sequence tokens)."""
    tokens = list(request.prompt_token_ids)
    for _ in range(request.sampling.max_tokens):
        tokens.append(digests(tokens, request.cache_salt)[-1] % VOCAB)
    return tokens[len(request.prompt_token_ids) :]


def make_request(request_id: str, tokens: Iterable[int], max_tokens: int = 3, salt: str = "") -> AddRequest:
    return AddRequest(request_id, list(tokens), SamplingParams(max_tokens=max_tokens, ignore_eos=True), cache_salt=salt)


@dataclass
class Rig:
    """A scheduler, its connector and workers made of digests. `step` is one turn of the core's loop."""

    limits: Limits
    has_connector: bool = True
    cells: dict[tuple[int, int], int] = field(default_factory=dict)
    outputs: dict[str, list[int]] = field(default_factory=dict)
    last: dict[str, RequestOutput] = field(default_factory=dict)
    requests: dict[str, AddRequest] = field(default_factory=dict)
    news: KVConnectorOutput = field(default_factory=KVConnectorOutput)
    plan: StepPlan = field(default_factory=lambda: StepPlan(0))
    lent: dict[str, list[tuple[int, dict[int, int]]]] = field(default_factory=dict)
    """Contents of delayed frees when they began: they must not change while a peer may read them."""

    def __post_init__(self) -> None:
        self.connector = make_connector(self.limits)
        self.scheduler = Scheduler(self.limits, self.connector if self.has_connector else None)

    # -- requests ------------------------------------------------------------------------------------------------

    def add(self, request: AddRequest, script: Script | None = None) -> None:
        self.connector.scripts[request.request_id] = script or Script()
        self.requests[request.request_id] = request
        refusal = self.scheduler.add(request)
        if refusal is not None:
            self.last[request.request_id] = refusal

    def abort(self, request_id: str) -> None:
        self.scheduler.abort(request_id)
        self._remember_lent()

    def run(self, max_steps: int = 500) -> None:
        """Step until nothing moves by itself any more."""
        for _ in range(max_steps):
            if not self.scheduler.wants_step and self.news.is_empty:
                return
            self.step()
        raise AssertionError("the scheduler does not come to rest")

    def tokens_of(self, request_id: str) -> list[int]:
        return self.outputs.get(request_id, [])

    def is_done(self, request_id: str) -> bool:
        return request_id in self.last

    # -- transfers -----------------------------------------------------------------------------------------------

    def end_load(self, request_id: str, failure: str | None = None) -> None:
        """The transfer of a request ends; its bytes are right unless it failed."""
        load = self.connector.loads.pop(request_id)
        if failure is None:
            self._write(load.block_ids, load.request.all_token_ids, load.start, load.end, load.request.cache_salt)
        else:
            self.news.failed_recving.add(request_id)
            self.news.failure_reasons[request_id] = failure
        self.news.finished_recving.add(request_id)

    def end_sending(self, request_id: str) -> None:
        for block, cells in self.lent.pop(request_id):
            assert cells == self._block(block), f"block {block} changed while a peer could read it"
        self.news.finished_sending.add(request_id)

    # -- one step ------------------------------------------------------------------------------------------------

    def step(self) -> StepPlan:
        self.plan = plan = self.scheduler.schedule()
        self._scribble()
        tokens = {part.request_id: token for part in plan.slices if (token := self._compute(part)) is not None}
        news, self.news = self.news, KVConnectorOutput()
        outputs = self.scheduler.update(plan, StepResult(tokens, news if self.has_connector else None))
        self._remember_lent()
        for output in outputs:
            self.outputs.setdefault(output.request_id, []).extend(token.token_id for token in output.tokens)
            assert output.request_id not in self.last, "an output after the last one"
            if output.finish_reason is not None:
                self.last[output.request_id] = output
        self.scheduler.check()
        return plan

    def _remember_lent(self) -> None:
        for request_id, block_ids in self.connector.newly_sending:
            self.lent[request_id] = [(block, self._block(block)) for block in block_ids]
        self.connector.newly_sending.clear()

    def _compute(self, part: Any) -> SampledToken | None:
        request = self.requests[part.request_id]
        known = [*request.prompt_token_ids, *self.tokens_of(part.request_id)]
        end = part.start + len(part.token_ids)
        assert tuple(known[part.start : end]) == part.token_ids
        written = set(part.block_ids[part.start // self.limits.block_size :])
        lent = {block for blocks in self.lent.values() for block, _ in blocks}
        assert not written & lent, f"{part.request_id} writes into blocks that a peer may read"
        self._write(part.block_ids, known, part.start, end, request.cache_salt)
        right = digests(known[:end], request.cache_salt)
        read = [self.cells.get(self._cell(part.block_ids, position)) for position in range(end)]
        assert read == right, f"{part.request_id} reads KV that is not its own"
        if part.sampling is None:
            return None
        assert end == len(known)
        return SampledToken(right[-1] % VOCAB)

    def _scribble(self) -> None:
        """A load in progress may have written anything into the blocks it fills."""
        for load in self.connector.loads.values():
            for position in range(load.start, load.end):
                self.cells[self._cell(load.block_ids, position)] = GARBAGE

    def _write(self, block_ids: Any, tokens: Any, start: int, end: int, salt: str) -> None:
        right = digests(tokens[:end], salt)
        for position in range(start, end):
            self.cells[self._cell(block_ids, position)] = right[position]

    def _cell(self, block_ids: Any, position: int) -> tuple[int, int]:
        return block_ids[position // self.limits.block_size], position % self.limits.block_size

    def _block(self, block: int) -> dict[int, int]:
        return {offset: self.cells.get((block, offset), 0) for offset in range(self.limits.block_size)}


def make_limits(**changes: Any) -> Limits:
    settings: Mapping[str, Any] = {
        "num_blocks": 16,
        "block_size": 4,
        "max_model_len": 64,
        "vocab_size": VOCAB,
        "max_num_batched_tokens": 16,
        "max_num_seqs": 4,
    }
    return Limits(**{**settings, **changes})


def assert_quiescent(rig: Rig) -> None:
    """Nothing is in use, nobody waits, and the connector heard of each request's end exactly once."""
    status = rig.scheduler.status()
    assert (status.num_running, status.num_waiting, status.num_waiting_for_remote_kvs) == (0, 0, 0)
    assert (status.num_used_blocks, status.num_delayed_frees) == (0, 0)
    rig.scheduler.check()
    if rig.has_connector:
        for request_id in rig.requests:
            assert rig.connector.times("request_finished", request_id) == rig.connector.times("on_new_request", request_id)
