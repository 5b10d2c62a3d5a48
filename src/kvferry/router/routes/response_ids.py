"""Ids of responses that name the instance which stores the response.

Pure. A vLLM server keeps the responses of `/v1/responses` that it made in its own memory, and uses
the id that the request asks for. The router asks for an id of random digits and a digest of these
digits, the instance and the tenant. From such an id, every router of the fleet finds the instance
again, without a table that could be lost. The id must never lead another tenant to the response:
for another tenant the digest differs, so no instance matches.
"""

import hmac
from collections.abc import Iterable
from hashlib import blake2b

from kvferry.router.fleet.instances import Instance

_PREFIX = "resp_"
_RANDOM_CHARS = 32
_DIGEST_BYTES = 8


def make_response_id(random_digits: str, tenant: str, instance: Instance) -> str:
    """The id of a response that the instance makes for the tenant. `random_digits`: 32 random hex
    digits, which make the id unique.
    """
    assert len(random_digits) == _RANDOM_CHARS
    return f"{_PREFIX}{random_digits}{_digest(random_digits, tenant, instance)}"


def find_holder(response_id: str, tenant: str, instances: Iterable[Instance]) -> Instance | None:
    """The instance that stores the tenant's response; None if none of these instances does."""
    # `compare_digest` raises TypeError for text that is not ASCII.
    if not response_id.startswith(_PREFIX) or not response_id.isascii():
        return None
    digits = response_id.removeprefix(_PREFIX)
    random_digits, digest = digits[:_RANDOM_CHARS], digits[_RANDOM_CHARS:]
    return next(
        (
            instance
            for instance in instances
            if hmac.compare_digest(_digest(random_digits, tenant, instance), digest)
        ),
        None,
    )


def _digest(random_digits: str, tenant: str, instance: Instance) -> str:
    text = f"{random_digits}\n{instance.address}\n{tenant}"
    return blake2b(text.encode("utf-8", "surrogateescape"), digest_size=_DIGEST_BYTES).hexdigest()
