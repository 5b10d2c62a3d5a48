"""Writes a small checkpoint with latent attention (DeepSeek-V2), run by the interpreter that has transformers: DIRECTORY TOKENIZER_FROM."""

import shutil
import sys
from pathlib import Path

import torch
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM


def main(directory: Path, tokenizer_from: Path) -> None:
    config = DeepseekV2Config(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_hidden_layers=4,
        first_k_dense_replace=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        q_lora_rank=None,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        qk_nope_head_dim=32,
        v_head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = DeepseekV2ForCausalLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2:
                # Strong enough for every earlier token to be felt in the logits.
                weight.normal_(0.0, weight.shape[1] ** -0.5 * (3.0 if "lm_head" in name or "q_proj" in name else 1.5))
    model.save_pretrained(directory)
    for path in tokenizer_from.glob("tokenizer*"):
        shutil.copy(path, directory)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
