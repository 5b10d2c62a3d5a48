"""Writes small hybrid models with random weights. Needs vLLM's Python interpreter:

    python hybrid_models.py falcon-h1 DIRECTORY

`falcon-h1`: attention and a Mamba2 mixer in every layer; float32. `qwen3-next`: three layers of
gated delta nets for each layer of attention, and experts; bfloat16.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from transformers import (
    FalconH1Config,
    FalconH1ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "bos_token_id": 508,
    "eos_token_id": 508,
    "pad_token_id": 511,
    "tie_word_embeddings": False,
}
SPREADS = {
    # States are products of three channels, each of which is a sum of four inputs only.
    "conv1d.weight": 0.6,
    # Attention must look at single tokens: the mean of many random values is nearly zero.
    "self_attn.q_proj.weight": 0.5,
    "self_attn.k_proj.weight": 0.5,
    "self_attn.v_proj.weight": 0.5,
    "": 0.15,
}
"""The standard deviation of weights by the end of their name, the first that fits: attention and
both kinds of state must each be large enough to change the next token.
"""
SLOW_DECAY = -3.0
"""States forget a tenth of what they hold with every token, instead of nearly all of it."""


def falcon_h1() -> Any:
    return FalconH1ForCausalLM(
        FalconH1Config(
            **SIZES,
            num_hidden_layers=3,
            mamba_d_ssm=64,
            mamba_n_heads=4,
            mamba_d_head=16,
            mamba_n_groups=2,
            mamba_d_state=16,
            mamba_d_conv=4,
            mamba_chunk_size=16,
        )
    ).float()


def qwen3_next() -> Any:
    return Qwen3NextForCausalLM(
        Qwen3NextConfig(
            **SIZES,
            num_hidden_layers=4,
            linear_num_value_heads=4,
            linear_num_key_heads=2,
            linear_key_head_dim=128,
            linear_value_head_dim=128,
            linear_conv_kernel_dim=4,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            shared_expert_intermediate_size=32,
            decoder_sparse_step=1,
        )
    ).bfloat16()


MAKERS = {"falcon-h1": falcon_h1, "qwen3-next": qwen3_next}


def main(name: str, directory: Path) -> None:
    torch.manual_seed(0)
    model = MAKERS[name]()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                spread = next(SPREADS[end] for end in SPREADS if parameter_name.endswith(end))
                parameter.normal_(0, spread)
            elif parameter_name.endswith("A_log"):
                parameter.fill_(SLOW_DECAY)
            elif parameter_name.endswith("mamba.D"):
                # The output depends on the state alone, not also on the input directly.
                parameter.zero_()
    model.save_pretrained(directory)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
