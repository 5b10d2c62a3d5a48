"""The name a request has in both legs and in every log: the client's, if it is fit to be one. Pure but for randomness."""

import random
import re

__all__ = ["choose_request_id"]

_FIT = re.compile(r"[A-Za-z0-9._:\-]{1,128}")
# Names must differ, and nobody is let in for knowing one: a system call for each would be wasted.
_draw = random.Random(random.SystemRandom().getrandbits(128)).getrandbits


def choose_request_id(sent: str | None) -> str:
    return sent if sent is not None and _FIT.fullmatch(sent) else f"{_draw(128):032x}"
