"""The name a request has in both legs and in every log: the client's, if it is fit to be one. Pure but for randomness."""

import re
import uuid

__all__ = ["choose_request_id"]

_FIT = re.compile(r"[A-Za-z0-9._:\-]{1,128}")


def choose_request_id(sent: str | None) -> str:
    return sent if sent is not None and _FIT.fullmatch(sent) else uuid.uuid4().hex
