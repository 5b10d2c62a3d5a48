"""Reads the `vllm serve` command lines that operators know, from operator_commands.txt."""

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

FILE = Path(__file__).with_suffix(".txt")
MODULE_PATH = "kv_connector_module_path"
FLAG = "--kv-transfer-config"


@dataclass(frozen=True)
class OperatorCommand:
    """One command line: the variables before it, and the words after `vllm serve MODEL`."""

    variables: Mapping[str, str]
    flags: tuple[str, ...]

    def without_port(self) -> tuple[str, ...]:
        """The flags without `--port`: the port of the command may be in use here."""
        words = list(self.flags)
        if "--port" in words:
            del words[words.index("--port") : words.index("--port") + 2]
        return tuple(words)

    @property
    def names_libfabric(self) -> bool:
        """NIXL's plugin for libfabric starts only where the machine has such a network."""
        return "LIBFABRIC" in " ".join(self.flags)

    def with_kvferry(self) -> "OperatorCommand":
        """The command with the key that lets vLLM load kvferry's connector."""
        words = list(self.flags)
        if FLAG in words:
            at = words.index(FLAG) + 1
            words[at] = json.dumps({**json.loads(words[at]), MODULE_PATH: "kvferry.vllm"})
        else:
            words += [f"{FLAG}.{MODULE_PATH}", "kvferry.vllm"]
        return OperatorCommand(self.variables, tuple(words))


def operator_commands(section: str) -> list[OperatorCommand]:
    text = FILE.read_text(encoding="utf-8").split(f"\n# {section}\n")[1].split("\n# ")[0]
    return [_parse(block) for block in re.split(r"\n\n+", text.strip())]


def _parse(block: str) -> OperatorCommand:
    words = shlex.split(block.replace("\\\n", " "))
    start = words.index("vllm")
    assert words[start + 1] == "serve"
    variables = dict(word.split("=", 1) for word in words[:start])
    return OperatorCommand(variables, tuple(words[start + 3 :]))


ALONE = operator_commands("alone")
PAIRS = operator_commands("P, then D, on one host")
HOSTS = operator_commands("two P and two D, each on a host of its own")
