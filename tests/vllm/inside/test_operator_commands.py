"""Tests that vLLM's own parser and configuration take every command line that operators know, and
find kvferry's connector in it. tests/vllm/test_operator_commands.py runs them.
"""

from pathlib import Path

import pytest
from tests.e2e.operator_commands import ALONE, HOSTS, PAIRS, OperatorCommand
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from kvferry.config import KVTransferConfig
from kvferry.vllm.connector import KVFerryConnector

COMMANDS = [*ALONE, *PAIRS, *HOSTS]


@pytest.mark.parametrize("command", COMMANDS, ids=range(len(COMMANDS)))
def test_vllm_finds_our_connector_in_a_command(model: Path, command: OperatorCommand) -> None:
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    words = ["--model", str(model), *command.with_kvferry().without_port()]
    transfer = EngineArgs.from_cli_args(parser.parse_args(words)).kv_transfer_config
    assert KVConnectorFactory.get_connector_class(transfer) is KVFerryConnector
    ours = KVTransferConfig.from_mapping(
        {
            "kv_connector": transfer.kv_connector,
            "kv_role": transfer.kv_role,
            "kv_connector_extra_config": transfer.kv_connector_extra_config,
        }
    )
    assert set(transfer.kv_connector_extra_config) <= set(type(ours.extra).__dataclass_fields__)
