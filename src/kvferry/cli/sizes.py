"""Numbers as people write them, `4096`, `1G`, `8k`, `512Mi`, a port or a device: how a flag's text becomes a value. Pure."""

import argparse
import re

from kvferry.engine.device_names import first_gpu
from kvferry.errors import ConfigError

__all__ = ["parse_device", "parse_port", "parse_size"]

SIZE = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,6})?)([kKmMgGtT]?)i?")
# As `vllm serve` reads them: small letters count in thousands, capitals in powers of two.
FACTORS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def parse_size(text: str) -> int:
    """For argparse: a whole number, with a unit or without."""
    match = SIZE.fullmatch(text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!a} is no size; write it like 4096, 8k or 1G")
    number, unit = match.groups()
    size = float(number) * FACTORS[unit] if "." in number else int(number) * FACTORS[unit]
    if size != int(size):
        raise argparse.ArgumentTypeError(f"{text!a} is not a whole number; write it like 4096, 8k or 1G")
    return int(size)


def parse_port(text: str) -> int:
    """For argparse: a port number, or 0."""
    if not re.fullmatch(r"[0-9]{1,5}", text) or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"must be a port number from 0 to 65535, got {text[:80]!a}")
    return int(text)


def parse_device(text: str) -> str:
    """For argparse: what an engine can be told to compute on."""
    try:
        first_gpu(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix("--device ")) from None
    return text
