"""Tests the random actions of test_fuzz.py with a `MultiConnector` on both sides: our connector
between engines beside two stores that hold back, fail, or raise exceptions at random.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.sampling import seeds
from tests.vllm.inside import test_fuzz
from tests.vllm.inside.conftest import StartEngine
from tests.vllm.inside.engines import Engine
from tests.vllm.inside.store import STORES, Store

ACTIONS = 200
RAISING = [
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "request_finished_all_groups",
    "get_transfer_results",
    "start_load_kv",
    "update_connector_output",
]


class World(test_fuzz.World):
    def _start(self, name: str, num_blocks: int, **more: Any) -> Engine:
        # A new incarnation has other weights than the stores of the last one.
        STORES[f"{name}0"], STORES[f"{name}1"] = Store(), Store()
        return super()._start(name, num_blocks, **more)

    def transfer(self, name: str, extra: dict[str, Any]) -> dict[str, Any]:
        stores = [
            {
                "kv_connector": "StoreConnector",
                "kv_connector_module_path": "tests.vllm.inside.store",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"store": f"{name}{index}"},
            }
            for index in range(2)
        ]
        ours = {
            "kv_connector": self.connector,
            "kv_role": "kv_both",
            "kv_connector_extra_config": {**extra, "transports": ["tcp"]},
        }
        return {
            "kv_connector": "MultiConnector",
            "kv_load_failure_policy": self.policy,
            "kv_connector_extra_config": {"connectors": [stores[0], ours, stores[1]]},
        }

    def actions(self) -> dict[Callable[[], None], float]:
        return {**super().actions(), self.disturb: 2, self.release: 1, self.break_store: 0.1}

    def disturb(self) -> None:
        store = self.rng.choice(list(STORES.values()))
        match self.rng.randrange(3):
            case 0:
                store.holds_loads = True
            case 1:
                store.holds_saves = True
            case 2:
                store.fails_loads = not store.fails_loads

    def release(self) -> None:
        for store in STORES.values():
            store.holds_loads = store.holds_saves = False

    def break_store(self) -> None:
        self.rng.choice(list(STORES.values())).raising.add(self.rng.choice(RAISING))

    def replace_weights(self) -> None:
        self.release()
        super().replace_weights()

    def sleep(self) -> None:
        self.release()
        super().sleep()

    def kill_p(self) -> None:
        self.release()
        super().kill_p()

    def end(self) -> None:
        self.release()
        super().end()


@pytest.fixture(autouse=True)
def _stores() -> Iterator[None]:
    STORES.clear()
    yield
    STORES.clear()


@pytest.mark.parametrize("connector", ["NixlConnector", "NixlPushConnector"])
@pytest.mark.parametrize("seed", seeds(4, exhaustively=24))
def test_whatever_happens_nothing_is_left(
    start_engine: StartEngine, seed: int, connector: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(World, "connector", connector)
    world = World(start_engine, seed, monkeypatch)
    for _ in range(ACTIONS):
        world.act()
    world.end()
    served = world.check_answers()
    loaded = sum(store.num_loaded_blocks for store in STORES.values())
    print(f"{world.policy} {world.faults} served={served} blocks from stores={loaded}")
