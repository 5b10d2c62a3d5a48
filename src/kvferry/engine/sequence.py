"""Sequences: the state of each request in the engine, the scheduler's queues and the counters.

Pure. The scheduler owns and changes every sequence; connectors read a sequence through the
`Request` protocol.
"""

from bisect import insort
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as ReadOnlySequence
from dataclasses import dataclass, field
from enum import Enum, Flag, auto
from operator import attrgetter
from typing import Any

from kvferry.connectors.contract import RequestStatus
from kvferry.engine.cache.blocks import GroupTable, hash_block, hash_root
from kvferry.engine.messages import AddRequest, SamplingParams


class Hold(Flag):
    """The transfers that still use the blocks of a sequence."""

    NONE = 0
    RECEIVING = auto()
    """A load writes into the blocks until `finished_recving` names the request."""
    SENDING = auto()
    """A peer reads the blocks until `finished_sending` names the request."""


class KVSource(Enum):
    """Whether the scheduler asks the connector for the KV of a sequence."""

    MAY_ASK = auto()
    LOADED = auto()
    """A load has succeeded; the connector must be notified when the sequence runs."""
    LOCAL_ONLY = auto()
    """A load has failed; the connector is never asked again for this sequence."""


@dataclass(frozen=True, slots=True)
class Match:
    """Number of leading tokens that need no computation, from the prefix cache and the connector.

    The external tokens follow the local tokens.
    """

    local_tokens: int = 0
    external_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        return self.local_tokens + self.external_tokens


@dataclass(slots=True, eq=False)
class Sequence:
    """One request in the engine: its tokens, the number of computed tokens, and its blocks."""

    request: AddRequest
    """The request of the API process, with `draw_seed` set."""
    arrival: int
    """Position in the order of arrival; the earliest arrival is served first."""
    token_ids: list[int] = field(init=False)
    """The prompt tokens and the output tokens."""
    status: RequestStatus = field(default=RequestStatus.WAITING, init=False)
    num_computed_tokens: int = field(default=0, init=False)
    """Number of leading tokens with usable KV in `tables`.

    The KV is complete as far as any later token attends to it.
    """
    tables: tuple[GroupTable, ...] = field(default=(), init=False)
    """One table per KV-cache group, of equal length in all groups with attention, which come first;
    empty while no block is held.
    """
    matched: Match = field(default=Match(), init=False)
    """The match found at the last admission."""
    num_cached_tokens: int = field(default=0, init=False)
    """Number of prompt tokens that were not computed here, up to the first output token."""
    hold: Hold = field(default=Hold.NONE, init=False)
    source: KVSource = field(default=KVSource.MAY_ASK, init=False)
    _hashes: list[bytes] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.token_ids = list(self.request.prompt_token_ids)

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def prompt_token_ids(self) -> ReadOnlySequence[int]:
        return self.request.prompt_token_ids

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_saved_tokens(self) -> int:
        """Number of cached tokens that saved computation.

        The last prompt token is always computed, because its logits are needed.
        """
        return min(self.num_cached_tokens, self.num_prompt_tokens - 1)

    @property
    def all_token_ids(self) -> ReadOnlySequence[int]:
        return self.token_ids

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.request.prompt_token_ids)

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def table_length(self) -> int:
        """Number of blocks per table of a group with attention."""
        return len(self.tables[0].block_ids) if self.tables else 0

    @property
    def draw_seed(self) -> int:
        return self.request.draw_seed or 0

    @property
    def sampling(self) -> SamplingParams:
        return self.request.sampling

    @property
    def kv_transfer_params(self) -> Mapping[str, Any] | None:
        return self.request.kv_transfer_params

    @property
    def cache_salt(self) -> str:
        return self.request.cache_salt

    @property
    def family(self) -> str | None:
        return self.request.family

    def block_hashes(self, block_size: int) -> list[bytes]:
        """Return the hash chain over all full blocks of the known tokens.

        Every call must pass the same block size.
        """
        while (len(self._hashes) + 1) * block_size <= len(self.token_ids):
            start = len(self._hashes) * block_size
            parent = self._hashes[-1] if self._hashes else hash_root(self.cache_salt)
            self._hashes.append(hash_block(parent, self.token_ids[start : start + block_size]))
        return self._hashes


# -- queues --
# Where each sequence of a scheduler is: waiting, loading remote KV, ready, running, or finished
# with blocks still held. Queues are ordered by arrival, so a preempted sequence keeps its queue
# position.


_ARRIVAL = attrgetter("arrival")


@dataclass(slots=True)
class SequenceQueues:
    """The queues of the scheduler.

    Each known sequence is in exactly one queue, except that an aborted sequence may be in both
    `loading` and `held`.
    """

    known: dict[str, Sequence] = field(default_factory=dict)
    """All sequences of the queues below, by request id."""
    waiting: list[Sequence] = field(default_factory=list)
    """Sequences not yet admitted, or preempted; they hold no blocks."""
    ready: list[Sequence] = field(default_factory=list)
    """Sequences whose remote KV has arrived; they hold blocks but do not compute yet."""
    running: list[Sequence] = field(default_factory=list)
    loading: dict[str, Sequence] = field(default_factory=dict)
    """Sequences with a load in progress; an aborted sequence stays until its load has ended."""
    held: dict[str, Sequence] = field(default_factory=dict)
    """Finished sequences whose blocks a load or a peer still uses."""

    def wait(self, seq: Sequence, status: RequestStatus = RequestStatus.WAITING) -> None:
        seq.status = status
        insort(self.waiting, seq, key=_ARRIVAL)

    def make_ready(self, seq: Sequence) -> None:
        seq.status = RequestStatus.WAITING
        insort(self.ready, seq, key=_ARRIVAL)

    def run(self, seq: Sequence) -> None:
        seq.status = RequestStatus.RUNNING
        insort(self.running, seq, key=_ARRIVAL)

    def load(self, seq: Sequence) -> None:
        seq.status = RequestStatus.WAITING_FOR_REMOTE_KVS
        seq.hold |= Hold.RECEIVING
        self.loading[seq.request_id] = seq

    def leave(self, seq: Sequence) -> None:
        """Remove a sequence from its queue."""
        for queue in (self.running, self.ready, self.waiting):
            if seq in queue:
                queue.remove(seq)
                return

    def youngest_holder(self) -> Sequence:
        """Return the sequence to preempt first: the last arrival that is running or ready."""
        return max((*self.running[-1:], *self.ready[-1:]), key=_ARRIVAL)

    @property
    def num_holders(self) -> int:
        return len(self.running) + len(self.ready)

    @property
    def num_loading(self) -> int:
        """Number of requests that wait for remote KV and are not aborted."""
        return sum(not seq.status.is_finished for seq in self.loading.values())

    @property
    def has_blocks_in_transfer(self) -> bool:
        """True if the end of a transfer will free blocks."""
        return bool(self.loading or self.held)

    def held_blocks(self) -> Iterator[list[int]]:
        """The blocks of every sequence, for `BlockPool.check`."""
        return (table.held for seq in self.known.values() for table in seq.tables)


# -- counters --
# Totals since the engine started, for /metrics.


@dataclass(slots=True)
class Counters:
    """Totals since the engine started."""

    arrivals: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    unknown_transfers: int = 0
    """Number of ids in connector output that match no transfer (duplicates or unknown requests)."""
    prompt_tokens_by_source: dict[str, int] = field(
        default_factory=lambda: {
            "local_compute": 0,
            "local_cache_hit": 0,
            "external_kv_transfer": 0,
        }
    )
    finished_by_reason: dict[str, int] = field(
        default_factory=lambda: {"stop": 0, "length": 0, "abort": 0, "error": 0}
    )

    def count_prompt(self, seq: Sequence) -> None:
        """Count the prompt of a sequence; call once per sequence, when the prompt is computed."""
        local = min(seq.matched.local_tokens, seq.num_prompt_tokens)
        external = seq.num_cached_tokens - local
        self.prompt_tokens += seq.num_prompt_tokens
        self.prompt_tokens_by_source["local_cache_hit"] += local
        self.prompt_tokens_by_source["external_kv_transfer"] += external
        self.prompt_tokens_by_source["local_compute"] += seq.num_prompt_tokens - local - external
