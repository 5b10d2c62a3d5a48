"""One request inside the engine: its tokens, how far they are computed, and the blocks that hold
their KV.

Pure. The scheduler owns and changes every sequence; connectors read it through the `Request`
protocol.
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

__all__ = ["Counters", "Hold", "KVSource", "Match", "Sequence", "SequenceQueues"]


class Hold(Flag):
    """Who besides the sequence itself still touches its blocks."""

    NONE = 0
    RECEIVING = auto()
    """A load writes into them; over when `finished_recving` names the request."""
    SENDING = auto()
    """A peer reads them; over when `finished_sending` names the request."""


class KVSource(Enum):
    """Whether the connector is asked for this sequence's KV."""

    MAY_ASK = auto()
    LOADED = auto()
    """A load has ended well; the connector is to be told when the sequence runs."""
    LOCAL_ONLY = auto()
    """A load has failed; never asked again."""


@dataclass(frozen=True, slots=True)
class Match:
    """Leading tokens that need no computing: so many from the local prefix cache, so many after
    them from the connector.
    """

    local_tokens: int = 0
    external_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        return self.local_tokens + self.external_tokens


@dataclass(slots=True, eq=False)
class Sequence:
    request: AddRequest
    """With a `draw_seed`."""
    arrival: int
    """Position in the order of arrival; who came first is served first."""
    token_ids: list[int] = field(init=False)
    """Prompt and output."""
    status: RequestStatus = field(default=RequestStatus.WAITING, init=False)
    num_computed_tokens: int = field(default=0, init=False)
    """Leading tokens whose KV is in `tables`, complete and usable as far as any later token looks
    at it.
    """
    tables: tuple[GroupTable, ...] = field(default=(), init=False)
    """Per KV-cache group; all of one length. None at all while it holds nothing."""
    matched: Match = field(default=Match(), init=False)
    """Of the last admission."""
    num_cached_tokens: int = field(default=0, init=False)
    """Prompt tokens that were not computed here, up to the first output token."""
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
        """Cached tokens that saved computing: the last one of a prompt is always computed, for its
        logits.
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
        """Blocks of tokens that the tables have room for."""
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
        """The hash chain over all full blocks of the tokens known so far. Always call with the same
        block size.
        """
        while (len(self._hashes) + 1) * block_size <= len(self.token_ids):
            start = len(self._hashes) * block_size
            parent = self._hashes[-1] if self._hashes else hash_root(self.cache_salt)
            self._hashes.append(hash_block(parent, self.token_ids[start : start + block_size]))
        return self._hashes


# -------------------- queues -------------------- Where every sequence of a scheduler is: waiting,
# loading remote KV, ready, running, or finished with blocks still held.
#
# Pure. Queues are ordered by arrival, so whatever happens to a sequence in between, who came first
# is served first.


_ARRIVAL = attrgetter("arrival")


@dataclass(slots=True)
class SequenceQueues:
    """Each known sequence is in exactly one place, except that an aborted one may be both `loading`
    and `held`.
    """

    known: dict[str, Sequence] = field(default_factory=dict)
    """Everything below, by request id."""
    waiting: list[Sequence] = field(default_factory=list)
    """Not admitted, or preempted: hold no blocks."""
    ready: list[Sequence] = field(default_factory=list)
    """Their remote KV is there; they hold blocks but do not compute yet."""
    running: list[Sequence] = field(default_factory=list)
    loading: dict[str, Sequence] = field(default_factory=dict)
    """A load writes into their blocks. Aborted ones stay until it has ended."""
    held: dict[str, Sequence] = field(default_factory=dict)
    """Finished, but a load or a peer still touches their blocks."""

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
        """Take a sequence out of the queue it stands in."""
        for queue in (self.running, self.ready, self.waiting):
            if seq in queue:
                queue.remove(seq)
                return

    def youngest_holder(self) -> Sequence:
        """Who gives up blocks first: the last to arrive of those that run or are ready."""
        return max((*self.running[-1:], *self.ready[-1:]), key=_ARRIVAL)

    @property
    def num_holders(self) -> int:
        return len(self.running) + len(self.ready)

    @property
    def num_loading(self) -> int:
        """Requests, not yet aborted, that wait for remote KV."""
        return sum(not seq.status.is_finished for seq in self.loading.values())

    @property
    def has_blocks_in_transfer(self) -> bool:
        """Whether blocks will come back when a transfer ends."""
        return bool(self.loading or self.held)

    def held_blocks(self) -> Iterator[list[int]]:
        """The blocks of every sequence, for `BlockPool.check`."""
        return (table.held for seq in self.known.values() for table in seq.tables)


# -------------------- counters --------------------
# What has happened in an engine since it started, as numbers for /metrics. Pure.


@dataclass(slots=True)
class Counters:
    arrivals: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    unknown_transfers: int = 0
    """Ids in connector output that name no transfer of ours: duplicates and strangers."""
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
        """To be called once per sequence, when its prompt is computed."""
        local = min(seq.matched.local_tokens, seq.num_prompt_tokens)
        external = seq.num_cached_tokens - local
        self.prompt_tokens += seq.num_prompt_tokens
        self.prompt_tokens_by_source["local_cache_hit"] += local
        self.prompt_tokens_by_source["external_kv_transfer"] += external
        self.prompt_tokens_by_source["local_compute"] += seq.num_prompt_tokens - local - external
