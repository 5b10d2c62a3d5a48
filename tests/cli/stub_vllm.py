#!/usr/bin/env python3
"""A stand-in for a Python interpreter that has vLLM: `-c CODE` reports packages and GPUs, and
`-m MODULE … --port PORT` is a server.

The name of the link that it is called by says what it does: `dies` ends with the log of a vLLM
whose engine failed, `lacks-vllm` and `lacks-kvferry` have no such package, `lacks-torch` cannot
import torch, `two-gpus` sees two GPUs, and `talks` prints a line of its own.
"""

import json
import sys
from pathlib import Path

KIND = Path(sys.argv[0]).name
LOG = """\
INFO 11-18 13:00:00 [core.py:110] Initializing a V1 LLM engine (v0.32.0) with config: model='m'
INFO 11-18 13:00:01 [cpu_model_runner.py:80] Starting to load model m...
(EngineCore pid=7) ERROR torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB.
(APIServer pid=6) RuntimeError: Engine core initialization failed. See root cause above.
"""

if sys.argv[1] == "-c":
    if KIND == "lacks-torch":
        raise ImportError("libtorch_cuda.so: cannot open shared object file")
    if KIND == "talks":
        print("torch: a newer version is available")
    found = {name: f"lacks-{name}" != KIND for name in ("vllm", "kvferry")}
    print(json.dumps({**found, "gpus": 2 if KIND == "two-gpus" else 0}))
elif KIND == "dies":
    print(LOG, end="", flush=True)
    sys.exit(1)
