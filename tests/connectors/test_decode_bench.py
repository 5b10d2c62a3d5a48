"""Tests `DecodeBenchConnector` with the calls an engine makes: which blocks it fills, and with
what.
"""

from typing import Any

import pytest
import torch
from tests.connectors.pair import BLOCK_SIZE, NUM_BLOCKS, Blocks, EngineRequest, MemoryKit, Step

from kvferry.config import KVTransferConfig, SideChannelConfig
from kvferry.connectors.contract import (
    ConnectorConfig,
    KVCacheConfig,
    KVCacheGroup,
    KVConnectorBase_V1,
    KVConnectorRole,
    ModelIdentity,
    ParallelConfig,
)
from kvferry.connectors.factory import KVConnectorFactory
from kvferry.errors import ConfigError
from kvferry.protocol.tickets import NO_BLOCK
from kvferry.transports.memory import MemoryNetwork

TOKENS = list(range(100, 118))
"""Four full blocks and two tokens."""
DUMMY = {"kv_connector": "DecodeBenchConnector", "kv_role": "kv_both"}


class Side:
    """An engine with two layers, the second with a sliding window, and both roles."""

    def __init__(self, dtype: torch.dtype = torch.float32, **extra: Any) -> None:
        groups = (KVCacheGroup(("full",)), KVCacheGroup(("window",), sliding_window=6))
        self.cache = KVCacheConfig(NUM_BLOCKS, BLOCK_SIZE, groups, "HND", 2, 8, "float32")
        self.transfer = KVTransferConfig.from_mapping({**DUMMY, "kv_connector_extra_config": extra})
        shape = (NUM_BLOCKS, 2, BLOCK_SIZE, 16)
        self.memory = {layer: torch.zeros(shape, dtype=dtype) for layer in ("full", "window")}
        self.scheduler = self.connector(KVConnectorRole.SCHEDULER)
        self.worker = self.connector(KVConnectorRole.WORKER)
        self.worker.register_kv_caches(self.memory)

    def connector(self, role: KVConnectorRole) -> KVConnectorBase_V1:
        config = ConnectorConfig(
            self.transfer,
            ModelIdentity("Tiny", "abc", 2, 2, 8, "float32"),
            ParallelConfig(),
            SideChannelConfig(port=0),
            b"secret",
            "epoch",
            MemoryKit(MemoryNetwork()),
        )
        return KVConnectorFactory.create_connector(config, role, self.cache)

    def step(self) -> None:
        self.worker.bind_connector_metadata(self.scheduler.build_connector_meta(Step()))
        self.worker.start_load_kv(None)
        self.worker.clear_connector_metadata()

    def load(self, *tables: list[int], num_computed_tokens: int = 0) -> int:
        request = EngineRequest("r", TOKENS)
        self.scheduler.on_new_request(request)
        count, is_async = self.scheduler.get_num_new_matched_tokens(request, num_computed_tokens)
        assert count is not None
        assert not is_async
        self.scheduler.update_state_after_alloc(request, Blocks(tables), count)
        self.step()
        return count

    def filled(self, layer: str) -> set[int]:
        return {block for block in range(NUM_BLOCKS) if self.memory[layer][block].any()}


def test_all_tokens_but_the_last_are_filled_in_every_group() -> None:
    side = Side()
    assert side.load([3, 4, 5, 6, 7], [NO_BLOCK, NO_BLOCK, 12, 13, 14]) == 17
    assert side.filled("full") == {3, 4, 5, 6, 7}
    assert side.filled("window") == {12, 13, 14}
    assert set(side.memory["full"][3].flatten().tolist()) == {torch.tensor(0.015).item()}


def test_blocks_that_the_engine_already_has_are_left_alone() -> None:
    side = Side()
    assert side.load([3, 4, 5, 6, 7], [11, 12, 13, 14, 15], num_computed_tokens=8) == 9
    assert side.filled("full") == {5, 6, 7}
    side.memory["full"].zero_()
    side.step()
    assert side.filled("full") == set()


def test_values_have_the_given_mean_and_spread() -> None:
    side = Side(fill_mean=3.0, fill_std=0.5)
    side.load([3, 4, 5, 6, 7], [11, 12, 13, 14, 15])
    values = side.memory["full"][[3, 4, 5, 6, 7]]
    assert abs(values.mean().item() - 3.0) < 0.2
    assert abs(values.std().item() - 0.5) < 0.1


def test_a_cache_of_bytes_gets_small_numbers() -> None:
    side = Side(torch.uint8)
    side.load([3, 4, 5, 6, 7], [11, 12, 13, 14, 15])
    for kind in (torch.float8_e4m3fn, torch.float8_e5m2):
        value = side.memory["full"][3].view(kind).float().flatten()[0].item()
        assert 0 < value < 0.1


def test_with_startup_fill_the_whole_cache_is_filled_once() -> None:
    side = Side(startup_fill=True)
    assert side.filled("full") == set(range(NUM_BLOCKS))
    side.memory["full"].zero_()
    assert side.load([3, 4, 5, 6, 7], [11, 12, 13, 14, 15]) == 17
    assert side.filled("full") == set()


def test_settings_are_checked() -> None:
    with pytest.raises(ConfigError, match="fill_std must be a number of at least 0"):
        Side(fill_std=-1.0)
    with pytest.raises(ConfigError, match="fill_men"):
        Side(fill_men=1.0)


def test_a_multi_connector_says_that_a_child_makes_up_kv() -> None:
    side = Side()
    nixl = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
    for children, expected in (([DUMMY, nixl], True), ([nixl], False)):
        side.transfer = KVTransferConfig.from_mapping(
            {
                "kv_connector": "MultiConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"connectors": children},
            }
        )
        made = side.connector(KVConnectorRole.SCHEDULER)
        assert made.provides_dummy_kv is expected
        made.shutdown()
