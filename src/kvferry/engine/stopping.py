"""When a sequence ends by itself. Pure. Stop strings are the API's business: it sees text and aborts."""

from dataclasses import dataclass

from kvferry.connectors.contract import RequestStatus
from kvferry.engine.limits import SchedulerLimits
from kvferry.engine.sequence import Sequence

__all__ = ["FINISH_REASONS", "Stop", "banned_token_ids", "find_stop"]

FINISH_REASONS = {
    RequestStatus.FINISHED_STOPPED: "stop",
    RequestStatus.FINISHED_LENGTH_CAPPED: "length",
    RequestStatus.FINISHED_ABORTED: "abort",
    RequestStatus.FINISHED_ERROR: "error",
}


@dataclass(frozen=True, slots=True)
class Stop:
    status: RequestStatus
    token_id: int | None = None
    """The requested stop token that ended the sequence; None for end of sequence and for lengths."""


def find_stop(seq: Sequence, limits: SchedulerLimits) -> Stop | None:
    """Whether the last token of a sequence ends it, and how. Of several reasons a stop token comes first."""
    sampling, last = seq.sampling, seq.token_ids[-1]
    if seq.num_output_tokens >= sampling.min_tokens:
        if last in sampling.stop_token_ids:
            return Stop(RequestStatus.FINISHED_STOPPED, last)
        if not sampling.ignore_eos and last in limits.eos_token_ids:
            return Stop(RequestStatus.FINISHED_STOPPED)
    if seq.num_output_tokens >= sampling.max_tokens or seq.num_tokens >= limits.max_total_tokens:
        return Stop(RequestStatus.FINISHED_LENGTH_CAPPED)
    return None


def banned_token_ids(seq: Sequence, limits: SchedulerLimits) -> tuple[int, ...]:
    """The tokens that would end a sequence, while it must not end."""
    if seq.num_output_tokens >= seq.sampling.min_tokens:
        return ()
    eos = () if seq.sampling.ignore_eos else limits.eos_token_ids
    return tuple(dict.fromkeys((*seq.sampling.stop_token_ids, *eos)))
