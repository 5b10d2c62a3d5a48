"""Tests that the router reads the fields that it needs itself as vLLM reads them, in every spelling
that vLLM accepts.
"""

import json

import pytest
from pydantic import ValidationError
from vllm.entrypoints.openai.completion.protocol import CompletionRequest

from kvferry.router.serving.client_request import ClientRequest, read_client_request

COUNTS = [
    *("2", "2.0", "2e0", "20e-1", "0.2E1", "2.5", "true", "1e1", "2.0000000000000000001", "[2]"),
    *('"2"', '"+2"', '" 2 "', '"2_0"', '"0_2"', '"2__0"', '"_2"', '"2_"', '"2.0"', '"2."', '"x"'),
    *('"2e0"', '"02"', '"2_0.0"', '"2.0_0"', '"+02.0"', '"+ 2"', '"++2"', '"0x2"', '""', "{}"),
    *(r'"\t2\n"', r'"\u00a02"', r'"2\u2003"', r'"\u0662"', r'"\uff12"', r'"\u200b2"', r'"\u0032"'),
]
FLAGS = [
    *("true", "false", "1", "0", "1.0", "1e0", "2", "null", "[]", '"true"', '"TRUE"', '" true"'),
    *('"on"', '"off"', '"1"', '"1.0"', '"Y"', '"tRuE"', r'"\u0074rue"', '"yes "'),
]


def body(field: str, spelling: str) -> bytes:
    return b'{"prompt": ["a", "b"], "%b": %b}' % (field.encode(), spelling.encode())


def read_by_vllm(field: str, spelling: str) -> object:
    """The value of the field; None if vLLM refuses it, or reads it as not set."""
    try:
        request = CompletionRequest.model_validate(json.loads(body(field, spelling)))
    except ValidationError:
        return None
    return getattr(request, field)


def read_by_router(field: str, spelling: str) -> ClientRequest | None:
    request = read_client_request(body(field, spelling))
    return request if isinstance(request, ClientRequest) else None


@pytest.mark.parametrize("spelling", COUNTS)
def test_the_number_of_choices_is_read_as_vllm_reads_it(spelling: str) -> None:
    read = read_by_router("n", spelling)
    assert (None if read is None else read.num_choices) == read_by_vllm("n", spelling)


@pytest.mark.parametrize("spelling", FLAGS)
def test_whether_an_answer_is_streamed_is_read_as_vllm_reads_it(spelling: str) -> None:
    read = read_by_router("stream", spelling)
    assert read is not None
    assert read.is_streamed == bool(read_by_vllm("stream", spelling))
