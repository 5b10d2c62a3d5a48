"""One request inside the engine: its tokens, how far they are computed, and the blocks that hold their KV.

Pure. The scheduler owns and changes every sequence; connectors read it through the `Request` protocol.
"""

from collections.abc import Mapping
from collections.abc import Sequence as ReadOnlySequence
from dataclasses import dataclass, field
from enum import Enum, Flag, auto
from typing import Any

from kvferry.connectors.contract import RequestStatus
from kvferry.engine.blocks import GroupTable, hash_block, hash_root
from kvferry.engine.messages import AddRequest
from kvferry.engine.step import SamplingParams

__all__ = ["Hold", "KVSource", "Match", "Sequence"]


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
    """Leading tokens that need no computing: so many from the local prefix cache, so many after them from the connector."""

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
    """Leading tokens whose KV is in `tables`, complete and usable as far as any later token looks at it."""
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
        """Cached tokens that saved computing: the last one of a prompt is always computed, for its logits."""
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
        """The hash chain over all full blocks of the tokens known so far. Always call with the same block size."""
        while (len(self._hashes) + 1) * block_size <= len(self.token_ids):
            start = len(self._hashes) * block_size
            parent = self._hashes[-1] if self._hashes else hash_root(self.cache_salt)
            self._hashes.append(hash_block(parent, self.token_ids[start : start + block_size]))
        return self._hashes
