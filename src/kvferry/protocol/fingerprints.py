"""Fingerprints of token sequences, and a lower bound on the prefix that two sequences share.

A fingerprint holds hashes of the first k tokens for a bounded number of values of k (points). Equal
hashes at k mean equal tokens up to k, so a fingerprint gives a lower bound on the longest common
prefix with another sequence without carrying the tokens. Pure.

    tokens   0        step      2*step          num_tokens
             |---------|---------|--- - - ---|-----|
    digests            d0        d1          d(n-2) d(n-1)
"""

from array import array
from collections.abc import Iterator, Sequence
from hashlib import blake2b

import msgspec

from kvferry.errors import RemoteProtocolError

# Equal hashes stand for equal tokens and untrusted clients write the texts, so 8 bytes would be too
# few (docs/decisions/033-reuse.md).
DIGEST_BYTES = 16
MAX_POINTS = 128
MAX_CHAIN_POINTS = 4096
"""Maximum points of a retained turn, because the next prompt may differ from the turn at any token:
one point per block up to 65,536 tokens at 16 per block, coarser beyond
(docs/decisions/033-reuse.md).
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
                f"fingerprint with step {self.step} over {self.num_tokens} tokens is not valid"
            )
        points = -(-self.num_tokens // self.step)
        if points > MAX_CHAIN_POINTS or len(self.digests) != points * DIGEST_BYTES:
            raise RemoteProtocolError(
                f"fingerprint has {len(self.digests)} bytes for {points} points"
            )


def fingerprint(
    token_ids: Sequence[int], granularity: int, salt: str, max_points: int = MAX_POINTS
) -> Fingerprint:
    """Return the fingerprint of a token sequence, with points at multiples of `granularity`.

    `salt` stands for everything else that the KV depends on (LoRA, multimodal hashes, tenant);
    fingerprints with different salts share no prefix.
    """
    chunks = -(-len(token_ids) // granularity)
    step = granularity * max(1, -(-chunks // max_points))
    return Fingerprint(
        step,
        len(token_ids),
        b"".join(digest for _, digest in _prefix_digests(token_ids, step, salt)),
    )


def common_prefix(theirs: Fingerprint, token_ids: Sequence[int], salt: str) -> int:
    """Return how many leading tokens both sequences certainly share; 0 if no prefix is certain."""
    shared = 0
    # Hash no further than the other sequence was hashed. If our sequence is shorter, its end is
    # usually not a point of the other fingerprint and cannot be compared.
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
    """Return how many leading tokens the sequences of two fingerprints certainly share.

    Only points that both fingerprints have can be compared.
    """
    theirs = dict(_points(other))
    shared = 0
    for tokens, digest in _points(one):
        if tokens in theirs and theirs[tokens] == digest:
            shared = tokens
    return shared


def _points(whole: Fingerprint) -> Iterator[tuple[int, bytes]]:
    """Yield (number of tokens, digest) for each point of a fingerprint."""
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
    """Yield (number of tokens, digest) at every multiple of `step` and at the end."""
    state = blake2b(digest_size=DIGEST_BYTES, person=b"kvferry tokens")
    # The length of the salt comes first, so that no salt can be confused with leading tokens.
    state.update(len(salt).to_bytes(8, "little") + salt.encode("utf-8", "surrogatepass"))
    for start in range(0, len(token_ids), step):
        segment = token_ids[start : start + step]
        state.update(array("q", segment).tobytes())
        yield start + len(segment), state.copy().digest()
