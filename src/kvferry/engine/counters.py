"""What has happened in an engine since it started, as numbers for /metrics. Pure."""

from dataclasses import dataclass, field

from kvferry.engine.sequence import Sequence

__all__ = ["Counters"]


@dataclass(slots=True)
class Counters:
    arrivals: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    unknown_transfers: int = 0
    """Ids in connector output that name no transfer of ours: duplicates and strangers."""
    prompt_tokens_by_source: dict[str, int] = field(
        default_factory=lambda: {"local_compute": 0, "local_cache_hit": 0, "external_kv_transfer": 0}
    )
    finished_by_reason: dict[str, int] = field(default_factory=lambda: {"stop": 0, "length": 0, "abort": 0, "error": 0})

    def count_prompt(self, seq: Sequence) -> None:
        """To be called once per sequence, when its prompt is computed."""
        local = min(seq.matched.local_tokens, seq.num_prompt_tokens)
        external = seq.num_cached_tokens - local
        self.prompt_tokens += seq.num_prompt_tokens
        self.prompt_tokens_by_source["local_cache_hit"] += local
        self.prompt_tokens_by_source["external_kv_transfer"] += external
        self.prompt_tokens_by_source["local_compute"] += seq.num_prompt_tokens - local - external
