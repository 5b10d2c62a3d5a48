"""Tests when P tells a router that its token begins the answer, with the fields that vLLM's
configuration and requests have.
"""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import ModelConfig, StructuredOutputsConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from kvferry.vllm.engine.first_token import FirstTokenNote

TICKET = {"do_remote_prefill": True, "ticket": "t"}
NOTE = {"first_token": {"max_model_len": 64}}


def config(
    defaults: dict[str, Any] | None = None,
    reasoning_parser: str = "",
    model_type: str = "llama",
    logits_processors: list[str] | None = None,
    watermark_config: object = None,
) -> SimpleNamespace:
    model = SimpleNamespace(
        max_model_len=64,
        logits_processors=logits_processors,
        hf_config=SimpleNamespace(model_type=model_type),
        get_diff_sampling_param=lambda: defaults or {},
    )
    return SimpleNamespace(
        model_config=model,
        structured_outputs_config=SimpleNamespace(reasoning_parser=reasoning_parser),
        watermark_config=watermark_config,
    )


def request(**changes: Any) -> SimpleNamespace:
    plain = {"mm_features": [], "prompt_embeds": None, "sampling_params": SamplingParams()}
    return SimpleNamespace(**plain | changes)


def test_vllm_has_the_fields_that_the_rules_read() -> None:
    assert {"structured_outputs_config", "model_config"} <= set(VllmConfig.__dataclass_fields__)
    assert "reasoning_parser" in StructuredOutputsConfig.__dataclass_fields__
    assert "logits_processors" in ModelConfig.__dataclass_fields__
    assert callable(ModelConfig.get_diff_sampling_param)
    assert {"mm_features", "prompt_embeds"} <= set(Request.__init__.__annotations__)


def test_a_plain_prefill_says_that_its_token_begins_the_answer() -> None:
    note = FirstTokenNote(config({"temperature": 0.6, "repetition_penalty": 1.05}), False)
    assert note.add_to(TICKET, request()) == TICKET | NOTE


@pytest.mark.parametrize(
    "changes",
    [
        {"defaults": {"presence_penalty": 1.5}},
        {"defaults": {"frequency_penalty": 1.5}},
        {"defaults": {"max_tokens": 9}},
        {"reasoning_parser": "qwen3"},
        {"model_type": "gpt_oss"},
        {"logits_processors": ["m:P"]},
        {"watermark_config": object()},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_server_whose_answers_depend_on_more_says_nothing(changes: dict[str, Any]) -> None:
    assert FirstTokenNote(config(**changes), False).add_to(TICKET, request()) == TICKET


def test_a_model_with_states_says_nothing() -> None:
    assert FirstTokenNote(config(), True).add_to(TICKET, request()) == TICKET


def test_prompts_that_are_more_than_tokens_and_other_requests_say_nothing() -> None:
    note = FirstTokenNote(config(), False)
    assert note.add_to(TICKET, request(mm_features=[object()])) == TICKET
    assert note.add_to(TICKET, request(prompt_embeds=object())) == TICKET
    parsed = SamplingParams(skip_special_tokens=False)
    assert note.add_to(TICKET, request(sampling_params=parsed)) == TICKET
    turn = {"do_remote_prefill": False, "do_remote_decode": True, "ticket": "t"}
    assert note.add_to(turn, request()) == turn
    assert note.add_to(None, request()) is None
