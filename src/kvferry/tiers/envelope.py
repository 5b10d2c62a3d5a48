"""The form of a stored entry: one page of header, then the payload. Pure.

    0        8        12          28    60               68     4064   4096
    | magic  | format | namespace | key | payload bytes  | zero | MAC  | payload …

The MAC is keyed BLAKE3 over the payload and the first 4064 bytes, under a key derived from the
cluster's secret. So storage can lose, damage, truncate, mix up or forge an entry, and the reader
finds out before it uses a byte. The header fills a page of 4096 bytes so that direct I/O can read
the payload straight into page-aligned memory.

HMAC-SHA256 would be slower than a fast disk: 0.4 GB/s on a core without instructions for SHA, where
BLAKE3 has 5 GB/s (docs/decisions/052-persistent-tiers.md).
"""

import hmac
import struct
from collections.abc import Iterable
from enum import Enum

from blake3 import blake3

from kvferry.tiers.base import EntryKey
from kvferry.tiers.keys import FORMAT_VERSION

HEADER_BYTES = 4096
MAGIC = b"kvferry\0"
PURPOSE = b"kvferry stored objects"
"""Part of the MAC's key, so that a MAC made for anything else in the cluster is invalid here."""

_FIELDS = struct.Struct("<8sI16s32sQ")
_MAC_BYTES = 32
_SIGNED_BYTES = HEADER_BYTES - _MAC_BYTES


class Refusal(Enum):
    """Why an entry is refused. The value completes the sentence `The object …`."""

    NOT_AN_ENTRY = "is not an object of kvferry"
    OTHER_VERSION = "has another format version"
    OTHER_NAMESPACE = "belongs to another namespace"
    OTHER_KEY = "belongs to another key"
    OTHER_LENGTH = "is truncated or has another length"
    BAD_MAC = "is damaged, or was not written with this cluster's secret"


class Envelope:
    """Seals and checks the entries of one namespace. Any thread may call any method."""

    def __init__(self, secret: bytes, namespace: bytes) -> None:
        """`namespace` is the namespace's digest."""
        self._namespace = namespace
        self._mac_key = hmac.digest(secret, PURPOSE, "sha256")

    def seal(self, key: EntryKey, payload: memoryview) -> bytes:
        """Return the header that makes this payload an entry."""
        fields = _FIELDS.pack(MAGIC, FORMAT_VERSION, self._namespace, key, len(payload))
        signed = fields.ljust(_SIGNED_BYTES, b"\0")
        return signed + self._mac(signed, [payload])

    def check(
        self, key: EntryKey, header: memoryview, payload: memoryview, stored_bytes: int
    ) -> Refusal | None:
        """Return why the entry may not be used as `key`, or None if every byte is as sealed.

        `stored_bytes` is the size of the whole entry in the storage. `header` is shorter than
        `HEADER_BYTES` if the entry is.
        """
        refusal = self.check_header(key, header, stored_bytes)
        if refusal is None and stored_bytes != HEADER_BYTES + len(payload):
            return Refusal.OTHER_LENGTH
        return refusal or self.check_payload(header, [payload])

    def check_header(self, key: EntryKey, header: memoryview, stored_bytes: int) -> Refusal | None:
        """Return why the entry may not be used, as far as its header tells."""
        if header[: len(MAGIC)] != MAGIC:
            return Refusal.NOT_AN_ENTRY
        if len(header) < HEADER_BYTES:
            return Refusal.OTHER_LENGTH
        _, version, namespace, sealed_key, sealed_bytes = _FIELDS.unpack_from(header)
        if version != FORMAT_VERSION:
            return Refusal.OTHER_VERSION
        if namespace != self._namespace:
            return Refusal.OTHER_NAMESPACE
        if sealed_key != key:
            return Refusal.OTHER_KEY
        return None if stored_bytes == HEADER_BYTES + sealed_bytes else Refusal.OTHER_LENGTH

    def check_payload(self, header: memoryview, pieces: Iterable[memoryview]) -> Refusal | None:
        """Check a whole entry after `check_header`. The pieces of its payload are used in turn."""
        mac = self._mac(header[:_SIGNED_BYTES], pieces)
        return None if hmac.compare_digest(header[_SIGNED_BYTES:], mac) else Refusal.BAD_MAC

    def _mac(self, signed: bytes | memoryview, pieces: Iterable[memoryview]) -> bytes:
        # The updates release the GIL. The payload comes first: BLAKE3 hashes a long input in larger
        # parts at once if nothing shorter is before it (9 % of the time for 256 KiB).
        mac = blake3(key=self._mac_key)
        for piece in pieces:
            mac.update(piece)
        return mac.update(signed).digest()
