"""Fingerprints of token sequences, and how long a prefix two of them are known to share.

A fingerprint holds a hash of the first k tokens for a bounded number of k, so the longest common
prefix with another sequence can be bounded from below without the tokens: equal hash at k means
equal tokens up to k. Pure.

    tokens   0        step      2*step          num_tokens
             |---------|---------|--- - - ---|-----|
    digests            d0        d1          d(n-2) d(n-1)
"""

from array import array
from collections.abc import Iterator, Sequence
from hashlib import blake2b

import msgspec

from kvferry.errors import RemoteProtocolError

__all__ = [
    "DIGEST_BYTES",
    "MAX_CHAIN_POINTS",
    "MAX_POINTS",
    "Fingerprint",
    "common_prefix",
    "fingerprint",
    "shared_prefix",
]

DIGEST_BYTES = 16
MAX_POINTS = 128
MAX_CHAIN_POINTS = 4096
"""Of sequences that others go on from at any point: at every block of a long conversation, coarser
beyond.
"""


class Fingerprint(msgspec.Struct, frozen=True):
    """Hashes of the prefixes of `num_tokens` tokens at every multiple of `step` and at the end."""

    step: int
    num_tokens: int
    digests: bytes

    def check(self) -> None:
        """Raise RemoteProtocolError unless the three fields fit together."""
        if self.step < 1 or self.num_tokens < 0:
            raise RemoteProtocolError(
                f"a fingerprint with step {self.step} over {self.num_tokens} tokens"
            )
        points = -(-self.num_tokens // self.step)
        if points > MAX_CHAIN_POINTS or len(self.digests) != points * DIGEST_BYTES:
            raise RemoteProtocolError(
                f"a fingerprint of {len(self.digests)} bytes for {points} points"
            )


def fingerprint(
    token_ids: Sequence[int], granularity: int, salt: str, max_points: int = MAX_POINTS
) -> Fingerprint:
    """Fingerprint of a sequence whose KV was made under `salt` (LoRA, multimodal hashes, tenant);
    points at multiples of `granularity`.
    """
    chunks = -(-len(token_ids) // granularity)
    step = granularity * max(1, -(-chunks // max_points))
    return Fingerprint(
        step,
        len(token_ids),
        b"".join(digest for _, digest in _prefix_digests(token_ids, step, salt)),
    )


def common_prefix(theirs: Fingerprint, token_ids: Sequence[int], salt: str) -> int:
    """Tokens that both sequences surely share from the start; 0 when nothing is known to be
    shared.
    """
    shared = 0
    # Our own end is no point of theirs unless the lengths agree, so hash only up to what they
    # hashed.
    ours = _prefix_digests(token_ids[: theirs.num_tokens], theirs.step, salt)
    for index, (tokens, digest) in enumerate(ours):
        is_their_point = tokens % theirs.step == 0 or tokens == theirs.num_tokens
        if (
            not is_their_point
            or digest != theirs.digests[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]
        ):
            break
        shared = tokens
    return shared


def shared_prefix(one: Fingerprint, other: Fingerprint) -> int:
    """Tokens that the sequences behind two fingerprints surely share from the start, as far as both
    have a hash there.
    """
    theirs = dict(_points(other))
    shared = 0
    for tokens, digest in _points(one):
        if tokens in theirs and theirs[tokens] == digest:
            shared = tokens
    return shared


def _points(whole: Fingerprint) -> Iterator[tuple[int, bytes]]:
    ends = (
        [*range(whole.step, whole.num_tokens, whole.step), whole.num_tokens]
        if whole.num_tokens
        else []
    )
    return (
        (tokens, whole.digests[index * DIGEST_BYTES :][:DIGEST_BYTES])
        for index, tokens in enumerate(ends)
    )


def _prefix_digests(token_ids: Sequence[int], step: int, salt: str) -> Iterator[tuple[int, bytes]]:
    state = blake2b(digest_size=DIGEST_BYTES, person=b"kvferry tokens")
    state.update(len(salt).to_bytes(8, "little") + salt.encode("utf-8", "surrogatepass"))
    for start in range(0, len(token_ids), step):
        segment = token_ids[start : start + step]
        state.update(array("q", segment).tobytes())
        yield start + len(segment), state.copy().digest()
