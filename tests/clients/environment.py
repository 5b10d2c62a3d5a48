"""Runs `ask.py` in the environment that has the clients: they bring dozens of packages along."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-clients" / "bin" / "python"
PATIENCE_S = 200


def ask_with(client: str, url: str, model: str) -> dict[str, Any]:
    """What the client got from the server; skips the test where the clients are not installed."""
    if not PYTHON.exists():
        pytest.skip("the clients are not installed here; make setup-vllm does it")
    # litellm would fetch a table of prices.
    ours = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [PYTHON, Path(__file__).with_name("ask.py"), client, url, model],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env={name: value for name, value in ours.items() if name != "PYTHONPATH"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
