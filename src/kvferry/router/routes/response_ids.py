"""Ids of responses that name the instance which stores the response.

Pure. vLLM stores the responses of `/v1/responses` in the server that made them, and lets the
request choose the id. The router chooses one from which every router of the fleet finds that
server again, without a table that could be lost: random digits, and a digest of these digits, the
tenant and the instance. Another tenant's requests find no instance, because the digest differs.
"""

import hmac
from collections.abc import Iterable
from hashlib import blake2b

from kvferry.router.fleet.instances import Instance

__all__ = ["find_holder", "make_response_id"]

_PREFIX = "resp_"
_RANDOM_CHARS = 32
_DIGEST_BYTES = 8


def make_response_id(random_digits: str, tenant: str, instance: Instance) -> str:
    """The id of a response that the instance makes for the tenant; 32 random hex digits make it
    unique.
    """
    assert len(random_digits) == _RANDOM_CHARS
    return f"{_PREFIX}{random_digits}{_digest(random_digits, tenant, instance)}"


def find_holder(response_id: str, tenant: str, instances: Iterable[Instance]) -> Instance | None:
    """The instance that stores the tenant's response; None if none of these instances does."""
    digits = response_id.removeprefix(_PREFIX)
    random_digits, digest = digits[:_RANDOM_CHARS], digits[_RANDOM_CHARS:]
    if response_id == digits or not digits.isascii():
        return None
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
