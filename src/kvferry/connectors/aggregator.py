"""Joins the reports of one engine's ranks: a transfer is over when every rank has reported its end.

Pure. The aggregator records which rank has reported which id, so a rank that reports twice does not
end a transfer early. Past a bound, the oldest ids are dropped, so that reports that never become
complete cannot grow without limit.
"""

from collections import OrderedDict
from collections.abc import Sequence

from kvferry.connectors.contract import KVConnectorOutput

MAX_PARTIAL = 100_000


class KVOutputAggregator:
    """Merges the per-rank outputs of each step and holds the ids that some ranks have not reported
    yet.
    """

    def __init__(self, expected_finished_count: int, max_partial: int = MAX_PARTIAL) -> None:
        self._expected = expected_finished_count
        self._max_partial = max_partial
        self._sending: OrderedDict[str, set[int]] = OrderedDict()
        self._recving: OrderedDict[str, set[int]] = OrderedDict()
        self._failed: dict[str, str] = {}
        """The failed receives that some ranks have not finished yet, with a reason."""
        self._mandatory: set[str] = set()
        """The subset of `_failed` that is not optional on some rank."""

    @property
    def num_partial(self) -> int:
        """The number of ids that some ranks, but not all, have reported."""
        return len(self._sending) + len(self._recving)

    def aggregate(self, outputs: Sequence[KVConnectorOutput | None]) -> KVConnectorOutput:
        """One output of all ranks. `outputs[i]` belongs to rank i and is None if rank i reports
        nothing.
        """
        whole = KVConnectorOutput()
        for rank, output in enumerate(outputs):
            if output is not None:
                self._take(rank, output, whole)
        # A receive fails if it failed on any rank, but only after every rank has finished: until
        # then blocks may still be written.
        for request in whole.finished_recving & self._failed.keys():
            whole.failed_recving.add(request)
            reason = self._failed.pop(request)
            if reason:
                whole.failure_reasons[request] = reason
            if request not in self._mandatory:
                whole.optional_failures.add(request)
        self._mandatory -= whole.failed_recving
        return whole

    def _take(self, rank: int, output: KVConnectorOutput, whole: KVConnectorOutput) -> None:
        for request in output.failed_recving:
            self._failed[request] = self._failed.get(request) or output.failure_reasons.get(
                request, ""
            )
        self._mandatory |= output.failed_recving - output.optional_failures
        whole.finished_sending |= self._count(self._sending, rank, output.finished_sending)
        whole.finished_recving |= self._count(self._recving, rank, output.finished_recving)
        whole.given_up_recving |= output.given_up_recving
        for request, times in output.recving_times.items():
            whole.recving_times.setdefault(request, []).extend(times)
        whole.invalid_block_ids |= output.invalid_block_ids
        if output.kv_connector_stats is not None:
            stats = whole.kv_connector_stats
            whole.kv_connector_stats = (
                output.kv_connector_stats
                if stats is None
                else stats.aggregate(output.kv_connector_stats)
            )
        meta = output.kv_connector_worker_meta
        if meta is not None:
            known = whole.kv_connector_worker_meta
            whole.kv_connector_worker_meta = meta if known is None else known.aggregate(meta)

    def _count(
        self, partial: OrderedDict[str, set[int]], rank: int, finished: set[str]
    ) -> set[str]:
        """Record one rank's ids and return the ids that every rank has now reported."""
        complete = set()
        for request in finished:
            ranks = partial.setdefault(request, set())
            ranks.add(rank)
            if len(ranks) >= self._expected:
                del partial[request]
                complete.add(request)
        while len(partial) > self._max_partial:
            forgotten, _ = partial.popitem(last=False)
            self._failed.pop(forgotten, None)
            self._mandatory.discard(forgotten)
        return complete
