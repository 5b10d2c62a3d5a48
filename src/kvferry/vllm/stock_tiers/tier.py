"""kvferry's storage tiers as secondary tiers of vLLM's own OffloadingConnector.

vLLM calls all methods on the engine's main thread; none waits for storage, `drain_jobs` excepted,
and that has a deadline. See docs/decisions/054-tiers-in-stock-vllm.md.
"""

import inspect
import logging
import os
import secrets
import time
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import partial
from hashlib import blake2b
from queue import Empty, SimpleQueue
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from kvferry.config.fields import Count, Seconds, Text, check_fields, refuse_unknown_keys
from kvferry.config.secret import ClusterSecret
from kvferry.errors import ConfigError
from kvferry.tiers.backoff import StorageFailed
from kvferry.tiers.base import KEY_BYTES, ObjectKey, Tier, TierUsage
from kvferry.tiers.keys import Namespace
from kvferry.vllm.connector import log_with_vllm
from kvferry.vllm.salts import CacheSalts
from kvferry.vllm.stock_tiers.host_engine import HostEngine
from kvferry.vllm.stock_tiers.lookups import Answer, Lookups, Question
from kvferry.vllm.stock_tiers.transfers import LOADS, STORES, Chunk, IoThreads, Transfers

__all__ = ["Incarnation", "StockTier", "StockTierSettings"]

COUNTERS = {
    LOADS: "Chunks that vLLM wanted from the tier, by outcome: loaded, missing, refused (damaged, "
    "truncated, forged or of another namespace), failed, timed_out, dropped.",
    STORES: "Chunks that vLLM gave to the tier, by outcome: stored, present, failed, timed_out, "
    "dropped (the tier was full, slow or suspended, or the chunk's adapter is unknown).",
}
GAUGES = {
    "used_bytes": "Bytes that the tier holds, as far as this engine knows.",
    "num_objects": "Objects that the tier holds, as far as this engine knows.",
    "is_suspended": "1 while vLLM's caches may hold KV of other weights than the engine's.",
}
PREFIX = "kvferry:stock_tier_"
USAGE_INTERVAL_S = 10.0

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Incarnation:
    """One set of weights of a running engine. Pure, but for randomness.

    The namespace names the weights of the engine's start. vLLM does not say what a reset was for,
    so from the first reset on, an engine stores under names that no other engine and no later
    incarnation has.
    """

    salt: bytes = b""
    """Part of every key; empty for the weights of the engine's start."""
    is_suspended: bool = False
    """Whether vLLM's caches may hold KV of other weights, so that nothing is stored or loaded."""

    def note_reset(self, is_cache_empty: bool) -> None:
        self.salt = secrets.token_bytes(16)
        self.is_suspended = not is_cache_empty

    def note_weights_change(self, is_cache_empty: bool) -> None:
        """Note that the weights may change now. Only a reset ends a suspension."""
        self.salt = secrets.token_bytes(16)
        self.is_suspended = self.is_suspended or not is_cache_empty

    def key(self, name: bytes, adapter: str) -> ObjectKey:
        """The key of the object that vLLM calls `name` (the hash of its tokens, and its group)."""
        digest = blake2b(digest_size=KEY_BYTES, person=b"kvferry stock")
        for part in (self.salt, adapter.encode(), name):
            digest.update(len(part).to_bytes(4, "little") + part)
        return ObjectKey(digest.digest())


@dataclass(frozen=True, slots=True)
class StockTierSettings:
    """The keys of an entry of `secondary_tiers`, besides those that vLLM reads."""

    locality: Text | None = None
    """`LOCAL` or `REMOTE`, for vLLM's `kv_load_tiers`."""
    load_timeout: Seconds = 10.0
    """After this, vLLM computes the chunks of a load that has not ended."""
    store_timeout: Seconds = 60.0
    num_read_threads: Count = 4
    num_write_threads: Count = 2

    def __post_init__(self) -> None:
        check_fields(self)
        if self.locality not in (None, *(each.value for each in Locality)):
            raise ConfigError(f"locality is LOCAL or REMOTE, not {self.locality}")


class StockTier(SecondaryTierManager):
    """The part that all kinds of storage have in common. A subclass opens the storage."""

    medium = Medium.STORAGE
    settings_class: type[StockTierSettings]

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **entry: Any,
    ) -> None:
        # vLLM 0.30 has no back-pressure.
        detector = {"backpressure_detector": backpressure_detector}
        super().__init__(
            offloading_spec,
            primary_kv_view,
            tier_type,
            **(detector if backpressure_detector is not None else {}),
        )
        log_with_vllm()
        names = [field.name for field in fields(self.settings_class)]
        refuse_unknown_keys(entry, names, tier_type)
        settings = self.settings_class(**entry)
        self.locality = Locality(settings.locality) if settings.locality is not None else None
        self._engine = HostEngine.find()
        self._engine.check_supported()
        rows = primary_kv_view.cast("B")
        num_rows, row_bytes = primary_kv_view.shape or (0, 0)
        namespace = self._engine.namespace(offloading_spec.config, row_bytes)
        self._tier = self.open_storage(settings, namespace, ClusterSecret.load(os.environ))
        self._requests = _Requests(CacheSalts.from_config(self._engine.vllm_config))
        if self._engine.vllm_config.lora_config is not None:
            self._requests.salts.adapters.watch_engine()
        self._incarnation = Incarnation()
        self._engine.watch_weights(self._note_weights_change)
        self._has_moved = False
        """Whether vLLM's CPU tier may hold KV of this incarnation."""
        self._transfers = Transfers(
            self._tier,
            rows,
            row_bytes,
            IoThreads(f"kvferry-{self._tier.name}-read", settings.num_read_threads),
            IoThreads(f"kvferry-{self._tier.name}-write", settings.num_write_threads),
            settings.load_timeout,
            settings.store_timeout,
            # The rows of waiting stores cannot be reused.
            max_pending_stores=max(1, num_rows // 4),
        )
        self._lookups = Lookups(settings.load_timeout)
        self._answers: SimpleQueue[tuple[Question, list[bool]]] = SimpleQueue()
        self._usage = TierUsage()
        self._next_usage = 0.0
        self._stuck_after_s = settings.load_timeout
        for threads in (self._transfers.readers, self._transfers.writers):
            threads.start()
        _log.info(
            "stores KV tier=%s namespace=%s weights=%s",
            tier_type,
            namespace.hex,
            namespace.factors["weights"],
        )

    def open_storage(self, settings: Any, namespace: Namespace, secret: ClusterSecret) -> Tier:
        """Open the storage that the settings name."""
        raise NotImplementedError

    # -- requests --

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        self._requests.add(req_context.req_id, self._engine.find_request(req_context.req_id))
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: Any) -> None:
        self._requests.remove(req_context.req_id)
        self._lookups.end_request(req_context.req_id)

    # -- lookups --

    def lookup(self, key: bytes, req_context: Any) -> LookupResult:
        if not self._may_use(req_context.req_id) or self._are_readers_stuck():
            return LookupResult.MISS
        self._take_answers()
        answer = self._lookups.ask(req_context.req_id, key, time.monotonic())
        return {
            Answer.STORED: LookupResult.HIT,
            Answer.ABSENT: LookupResult.MISS,
            Answer.UNKNOWN: LookupResult.RETRY,
        }[answer]

    def on_schedule_end(self, context: Any) -> None:
        for question in self._lookups.take_questions():
            adapter = self._requests.adapter(question.request_id)
            if adapter is None:
                self._lookups.mark_absent(question.names)
                continue
            keys = [self._incarnation.key(name, adapter) for name in question.names]
            self._transfers.readers.submit(partial(self._find, question, keys))

    def _find(self, question: Question, keys: list[ObjectKey]) -> None:
        """Runs on a reader thread."""
        found = [False] * len(keys)
        with suppress(StorageFailed):
            if self._engine.asks_for_prefixes:
                num_found = self._tier.find_prefix(keys)
                found = [number < num_found for number in range(len(keys))]
            else:
                found = self._tier.find(keys)
        self._answers.put((question, found))

    def _take_answers(self) -> None:
        while True:
            try:
                self._lookups.answer(*self._answers.get_nowait())
            except Empty:
                return

    def _may_use(self, request_id: str) -> bool:
        return not self._incarnation.is_suspended and self._requests.is_known(request_id)

    def _are_readers_stuck(self) -> bool:
        return self._transfers.readers.are_stuck(self._stuck_after_s)

    # -- jobs --

    def submit_store(self, job_metadata: Any) -> None:
        self._has_moved = True
        chunks = self._chunks(job_metadata)
        if chunks is not None:
            self._transfers.store(job_metadata.job_id, chunks)

    def submit_load(self, job_metadata: Any) -> None:
        self._has_moved = True
        chunks = self._chunks(job_metadata)
        if chunks is not None:
            self._transfers.load(job_metadata.job_id, chunks)

    def _chunks(self, job: Any) -> list[Chunk] | None:
        """The chunks of a job; None if the tier must not be used for it, which is reported."""
        request_id = job.req_context.req_id
        adapter = self._requests.adapter(request_id) if self._may_use(request_id) else None
        rows = [int(row) for row in job.chunk_ids]
        chunks = [
            Chunk(name, self._incarnation.key(name, adapter or ""), row)
            for name, row in zip(job.keys, rows, strict=True)
        ]
        if adapter is not None:
            return chunks
        self._transfers.drop(job.job_id, chunks, job.is_promotion)
        return None

    def get_finished_jobs(self) -> Iterable[Any]:
        results = []
        for job in self._transfers.take_finished():
            if job.is_load:
                self._lookups.mark_absent(job.failed)
            results.append(
                _job_result(
                    job_id=job.job_id,
                    success=not job.failed,
                    successful_keys=job.done if job.is_load and job.done else None,
                    transfer_time=job.seconds,
                    transfer_bytes=len(job.done) * self._transfers.row_bytes,
                )
            )
        return results

    def touch(self, keys: Collection[bytes], req_context: Any) -> None:
        """The storage notes the use of an object when it is read."""

    def drain_jobs(self) -> None:
        """End all jobs. vLLM calls this only when its caches are reset, because the weights have
        changed or will change. It is the only call about a reset that a tier gets.
        """
        self._transfers.drain(self._transfers.load_timeout_s)
        is_cache_empty = self._engine.are_blocks_free()
        self._incarnation.note_reset(is_cache_empty)
        self._lookups.forget()
        self._has_moved = False
        if is_cache_empty:
            _log.info("objects stored so far are not used any more because the caches are reset")
        else:
            _log.warning(
                "vLLM's prefix cache could not be reset because requests hold blocks: no KV is "
                "stored or loaded until reset_prefix_cache with reset_connector has returned true"
            )

    def _note_weights_change(self, call: str) -> None:
        is_cache_empty = not (
            self._has_moved or self._transfers.has_jobs() or self._engine.has_cached_blocks()
        )
        was_suspended = self._incarnation.is_suspended
        self._incarnation.note_weights_change(is_cache_empty)
        self._lookups.forget()
        if not self._incarnation.is_suspended:
            _log.info(
                "objects stored so far are not used any more because a remote call may change the "
                "weights call=%s",
                call,
            )
        elif not was_suspended:
            _log.warning(
                "a remote call may change the weights while vLLM's caches hold KV: no KV is stored "
                "or loaded until reset_prefix_cache with reset_connector has returned true call=%s",
                call,
            )

    # -- metrics, end --

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        return {
            **{
                PREFIX + name: OffloadingCounterMetadata(
                    documentation=text, labelnames=("tier", "outcome")
                )
                for name, text in COUNTERS.items()
            },
            **{
                PREFIX + name: OffloadingGaugeMetadata(documentation=text, labelnames=("tier",))
                for name, text in GAUGES.items()
            },
        }

    def get_stats(self) -> OffloadingConnectorStats | None:
        stats = OffloadingConnectorStats()
        label = (self.tier_type,)
        for (direction, outcome), count in self._transfers.take_counts().items():
            stats.increase_counter(PREFIX + direction, count, (*label, outcome))
        now = time.monotonic()
        if now >= self._next_usage:
            self._next_usage = now + USAGE_INTERVAL_S
            self._transfers.writers.submit(self._measure)
        stats.set_gauge(PREFIX + "used_bytes", self._usage.used_bytes, label)
        stats.set_gauge(PREFIX + "num_objects", self._usage.num_objects, label)
        stats.set_gauge(PREFIX + "is_suspended", int(self._incarnation.is_suspended), label)
        return stats

    def _measure(self) -> None:
        """Runs on a writer thread."""
        self._usage = self._tier.usage()

    def shutdown(self) -> None:
        self._transfers.drain(self._transfers.load_timeout_s)
        for threads in (self._transfers.readers, self._transfers.writers):
            threads.close()
        # vLLM unmaps the memory next.
        self._transfers.rows.release()
        self._tier.close()


@dataclass(slots=True)
class _Requests:
    """The requests that the engine has now, and whether their KV may be stored."""

    salts: CacheSalts
    _requests: dict[str, Any] = field(default_factory=dict, init=False)

    def add(self, request_id: str, request: Any) -> None:
        """Note a new request. `request` is None if vLLM serves it for another engine: then nothing
        is known about its adapter.
        """
        if request is None or (self.salts.numbers_media and request.mm_features):
            return
        self.salts.note_request(request)
        self._requests[request_id] = request

    def remove(self, request_id: str) -> None:
        self._requests.pop(request_id, None)

    def is_known(self, request_id: str) -> bool:
        return request_id in self._requests

    def adapter(self, request_id: str) -> str | None:
        """A digest of the request's LoRA adapter, empty without one; None if vLLM may serve other
        contents. vLLM's keys have the adapter's name and path, but not its contents.
        """
        request = self._requests.get(request_id)
        if request is None:
            return None
        if not request.lora_request:
            return ""
        return self.salts.adapters.digest(request.lora_request)


_JOB_RESULT_FIELDS = frozenset(inspect.signature(JobResult).parameters)


def _job_result(**fields: Any) -> Any:
    # vLLM 0.30 has no `transfer_bytes`.
    return JobResult(**{name: fields[name] for name in fields.keys() & _JOB_RESULT_FIELDS})
