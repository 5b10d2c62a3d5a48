from typing import Any

import msgspec
import pytest

from kvferry.engine.api.admission import RequestAdmission
from kvferry.engine.api.schema import CompletionRequest
from kvferry.engine.messages import AddRequest, CoreReady
from kvferry.engine.model.config import SamplingDefaults
from kvferry.errors import RequestRefused

READY = CoreReady(max_model_len=100, num_blocks=8, block_size=16, eos_token_ids=[2], vocab_size=50)
NONCES = [f"{index:08x}" for index in range(64)]


def admit(
    prompts: list[list[int]],
    default_max_tokens: int | None = 16,
    ready: CoreReady = READY,
    **body: Any,
) -> list[AddRequest]:
    request = msgspec.convert({"prompt": "", **body}, CompletionRequest)
    return RequestAdmission(
        request, "cmpl-x", prompts, request.max_tokens, default_max_tokens, request.logprobs
    ).add_requests(ready, NONCES)


def test_the_model_has_its_own_sampling_where_the_client_asks_for_none() -> None:
    ready = msgspec.structs.replace(READY, sampling=SamplingDefaults(0.7, 0.9, 20))
    (request,) = admit([[1]], ready=ready)
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.7, 0.9, 20)
    (request,) = admit([[1]], ready=ready, temperature=0, top_p=1.0, top_k=-1)
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.0, 1.0, 0)


def test_defaults_are_those_of_the_api() -> None:
    (request,) = admit([[1, 2, 3]])
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (
        16,
        1.0,
        1.0,
        0,
    )
    assert (
        request.draw_seed,
        request.kv_transfer_params,
        request.cache_salt,
        sampling.logprobs,
    ) == (None, None, "", None)


def test_choices_have_one_prompt_other_ids_and_neighbouring_seeds() -> None:
    requests = admit([[1], [2]], n=2, seed=7)
    assert [request.request_id for request in requests] == [
        f"cmpl-x-{index}-{index:08x}" for index in range(4)
    ]
    assert [request.prompt_token_ids for request in requests] == [[1], [1], [2], [2]]
    assert [request.draw_seed for request in requests] == [7, 8, 7, 8]


def test_kv_transfer_params_go_with_the_first_prompt_only() -> None:
    params = {"do_remote_prefill": True}
    requests = admit([[1], [2]], n=2, kv_transfer_params=params)
    assert [request.kv_transfer_params for request in requests] == [params, params, None, None]


def test_a_max_tokens_of_the_client_must_fit_and_a_default_is_clipped() -> None:
    assert admit([[1] * 90], max_tokens=10)[0].sampling.max_tokens == 10
    with pytest.raises(RequestRefused, match="lower max_tokens to 10"):
        admit([[1] * 90], max_tokens=11)
    assert admit([[1] * 90])[0].sampling.max_tokens == 10
    assert admit([[1] * 90], default_max_tokens=None)[0].sampling.max_tokens == 10


@pytest.mark.parametrize(
    ("prompts", "body", "param"),
    [
        ([[]], {}, "prompt"),
        ([[1] * 100], {}, "prompt"),
        ([[50]], {}, "prompt"),
        ([[-1]], {}, "prompt"),
        ([[10**30]], {}, "prompt"),
        ([[1], []], {}, "prompt"),
        ([[1]], {"stop_token_ids": [50]}, "stop_token_ids"),
        ([[1]], {"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
    ],
)
def test_what_does_not_fit_the_model_is_refused(
    prompts: list[list[int]], body: dict[str, Any], param: str
) -> None:
    with pytest.raises(RequestRefused) as refused:
        admit(prompts, **body)
    assert refused.value.param == param


def test_too_many_sequences_are_refused() -> None:
    with pytest.raises(RequestRefused, match="send fewer"):
        admit([[1]] * 20, n=128)


def test_temperatures_that_would_overflow_are_raised_and_zero_stays_greedy() -> None:
    assert admit([[1]], temperature=1e-300)[0].sampling.temperature == 0.01
    assert admit([[1]], temperature=0)[0].sampling.temperature == 0


def test_every_top_k_that_means_no_limit_is_zero() -> None:
    assert [admit([[1]], top_k=top_k)[0].sampling.top_k for top_k in (-1, 0, 5)] == [0, 0, 5]


def test_seeds_stay_in_range() -> None:
    assert all(
        0 <= (request.draw_seed or 0) < 2**63
        for seed in (2**63 - 1, -(2**63), -1)
        for request in admit([[1]], n=2, seed=seed)
    )
