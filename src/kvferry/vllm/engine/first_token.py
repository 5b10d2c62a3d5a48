"""Tells routers whether the token that a vLLM prefill instance samples begins the client's answer.

A router may then send P's token to the client and let D continue after it, as a completion whose
prompt ends with that token (docs/decisions/062-first-token-from-p.md). The router checks the fields
of the request; this module checks what only the engine knows. It must add no note where D could
continue otherwise than P would. Runs in the connector's scheduler side.
"""

from importlib.metadata import entry_points
from typing import Any

from kvferry.connectors.nixl.params import first_token_params

_COUNTING_DEFAULTS = frozenset(("presence_penalty", "frequency_penalty", "max_tokens"))
"""Sampling defaults that count the tokens of the answer. D would count one token less, because P's
token is part of D's prompt.
"""


class FirstTokenNote:
    """Adds a note to the `kv_transfer_params` that P returns, if D may continue after P's token."""

    def __init__(self, vllm_config: Any, has_states: bool) -> None:
        model = vllm_config.model_config
        # With states, a prefill leg leaves out the last token of the prompt, so the token that it
        # samples means nothing.
        is_possible = (
            not has_states
            and not vllm_config.structured_outputs_config.reasoning_parser
            and getattr(vllm_config, "watermark_config", None) is None
            and not model.logits_processors
            # vLLM also loads the processors that installed packages provide.
            and not entry_points(group="vllm.logits_processors")
            # vLLM parses every chat of these models.
            and model.hf_config.model_type != "gpt_oss"
            and not _COUNTING_DEFAULTS & model.get_diff_sampling_param().keys()
        )
        self._note = first_token_params(model.max_model_len) if is_possible else {}

    def add_to(self, params: dict[str, Any] | None, request: Any) -> dict[str, Any] | None:
        """Return the parameters of a finished request, with the note if it applies."""
        # P returns these parameters for D, so a prefill leg has `do_remote_prefill`.
        if params is None or params.get("do_remote_prefill") is not True:
            return params
        # D would get the tokens of the prompt, without images and embeddings.
        if request.mm_features or request.prompt_embeds is not None:
            return params
        # A tool parser of the server asks for special tokens, and then parses every chat.
        if request.sampling_params is not None and not request.sampling_params.skip_special_tokens:
            return params
        return params | self._note
