"""A program for vLLM's interpreter: runs vLLM's offline engine in one process, asks it one prompt
several times, and writes the answers to a file as JSON.

    python offline_asking.py MODEL TRANSFER SETTINGS OUTPUT STEP...

TRANSFER is the transfer configuration as JSON, or null; SETTINGS are more settings of vLLM's engine
as JSON. A step is `ask`, `ask with salt`, or `forget`, which drops
vLLM's own prefix cache, or a folder to remove.
"""

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

TOKENS = [10 + (index * 7) % 300 for index in range(200)]
BLOCK = 32


def main(model: str, transfer: str, more: str, output: str, *steps: str) -> None:
    # vLLM reads these when it is imported.
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
    from vllm.config import KVTransferConfig

    import kvferry
    from vllm import LLM, SamplingParams

    settings = json.loads(transfer)
    llm = LLM(
        model=model,
        kv_transfer_config=None if settings is None else KVTransferConfig(**settings),
        block_size=BLOCK,
        enforce_eager=True,
        dtype="float32",
        max_model_len=512,
        disable_hybrid_kv_cache_manager=True,
        **json.loads(more),
    )
    answers: list[dict[str, Any]] = []
    for step in steps:
        if step in ("ask", "ask with salt"):
            salt = {} if step == "ask" else {"cache_salt": "salt"}
            (answer,) = llm.generate(
                {"prompt_token_ids": TOKENS, **salt},
                SamplingParams(max_tokens=8, temperature=0, ignore_eos=True),
                use_tqdm=False,
            )
            answers.append(
                {
                    "tokens": list(answer.outputs[0].token_ids),
                    "cached": answer.num_cached_tokens,
                }
            )
        elif step == "forget":
            assert llm.reset_prefix_cache()
        else:
            shutil.rmtree(step)
            Path(step).mkdir()
    Path(output).write_text(json.dumps({"kvferry": kvferry.__file__, "answers": answers}))


if __name__ == "__main__":
    main(*sys.argv[1:])
