"""Step 3 of 3: write the checkpoint that the package ships.

    python scripts/train_model/write.py build/train build/train/weights.npz

Needs `safetensors` and `numpy`. The result is a complete folder in the layout of Hugging Face.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer
from train import (
    CONTEXT,
    HEAD_DIM,
    HIDDEN_SIZE,
    INTERMEDIATE_SIZE,
    NORM_EPS,
    NUM_HEADS,
    NUM_KV_HEADS,
    NUM_LAYERS,
    ROPE_THETA,
    VOCAB_SIZE,
)

TARGET = Path(__file__).parents[2] / "src/kvferry/engine/default_model"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def main(folder: Path, weights: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    end_of_text, end_of_turn, pad = (
        tokenizer.token_to_id(token) for token in ("<|endoftext|>", "<|im_end|>", "<|pad|>")
    )
    TARGET.mkdir(parents=True, exist_ok=True)
    with np.load(weights) as tensors:
        save_file(
            {name: np.ascontiguousarray(tensors[name]) for name in sorted(tensors)},
            TARGET / "model.safetensors",
            metadata={"format": "pt"},
        )
    (TARGET / "tokenizer.json").write_text(tokenizer.to_str(pretty=False) + "\n")
    tokens = {"bos_token_id": end_of_text, "pad_token_id": pad}
    _write("config.json", _config() | tokens | {"eos_token_id": end_of_text})
    _write(
        "generation_config.json",
        tokens
        | {"eos_token_id": [end_of_text, end_of_turn]}
        | {"do_sample": True, "temperature": 0.7, "top_p": 0.9},
    )
    _write(
        "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|endoftext|>",
            "eos_token": "<|endoftext|>",
            "pad_token": "<|pad|>",
            "model_max_length": CONTEXT,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )


def _config() -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "dtype": "float16",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": INTERMEDIATE_SIZE,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": NUM_KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": NORM_EPS,
        "rope_theta": ROPE_THETA,
        "rope_scaling": None,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
        "use_cache": True,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": NUM_LAYERS,
    }


def _write(name: str, value: dict[str, Any]) -> None:
    (TARGET / name).write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
