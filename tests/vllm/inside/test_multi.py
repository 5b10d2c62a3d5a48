"""Tests kvferry's `MultiConnector` in vLLM's own scheduler, with our connector between two engines,
a store in this process, and vLLM's own children.

The engines compare every slot that a forward would read with the right number; `settle` also checks
that nothing is outstanding.
"""

import json
from collections.abc import Iterator
from copy import copy
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from tests.vllm.inside.conftest import StartEngine
from tests.vllm.inside.engines import BLOCK, Engine, run_until, vllm_config
from tests.vllm.inside.store import STORES, Store
from tests.vllm.inside.test_life_cycle import finish, greedy, prompt, settle, wait_for_load
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1, SupportsHMA
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.core.sched.output import CachedRequestData
from vllm.v1.kv_cache_interface import KVCacheConfig

from kvferry.connectors.multi.requests import LimitedStep
from kvferry.errors import ConfigError
from kvferry.router.fleet.instance_metrics import read_metrics
from kvferry.vllm.child import VllmChild
from kvferry.vllm.connector import KVFerryConnector
from kvferry.vllm.engine.progress import VllmStep
from kvferry.vllm.identity.salts import CacheSalts
from kvferry.vllm.multi import MultiConnector, child_configs
from kvferry.vllm.translate import BlocksView, VllmRequestView

PULL = {
    "kv_connector": "NixlConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"transports": ["tcp"]},
}
STOCK_NIXL = {
    "kv_connector": "NixlConnector",
    "kv_connector_module_path": "vllm.distributed.kv_transfer.kv_connector.v1.nixl",
    "kv_role": "kv_both",
}
MORIIO = {"kv_connector": "MoRIIOConnector", "kv_role": "kv_both"}
OFFLOADING = {
    "kv_connector": "OffloadingConnector",
    "kv_connector_module_path": "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {
        "cpu_bytes_to_use": 1 << 26,
        "spec_name": "HostSpec",
        "spec_module_path": "tests.vllm.inside.host_spec",
    },
}
DUMMY = {
    "kv_connector": "DecodeBenchConnector",
    "kv_connector_module_path": (
        "vllm.distributed.kv_transfer.kv_connector.v1.decode_bench_connector"
    ),
    "kv_role": "kv_both",
}


def kept_in(store: str, kind: str = "StoreConnector") -> dict[str, Any]:
    return {
        "kv_connector": kind,
        "kv_connector_module_path": "tests.vllm.inside.store",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"store": store},
    }


def multi(*children: dict[str, Any], **more: Any) -> dict[str, Any]:
    """The transfer configuration of an engine."""
    policy = more.pop("kv_load_failure_policy", "fail")
    return {
        "kv_connector": "MultiConnector",
        "kv_connector_module_path": "kvferry.vllm",
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": {"connectors": list(children), **more},
    }


@pytest.fixture
def store() -> Iterator[Store]:
    STORES.clear()
    STORES["d"] = Store()
    yield STORES["d"]
    STORES.clear()


def put(d: Engine, store: Store, num_tokens: int) -> None:
    """Let D compute and save a prefix of the prompt, then forget it itself."""
    d.add("put", prompt(num_tokens), max_tokens=1)
    finish(d, "put")
    run_until(lambda: not d.remains(), d)
    assert d.scheduler.reset_prefix_cache()
    assert len(store.blocks) == num_tokens // BLOCK


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("kind", ["pull", "push"])
def test_the_store_gives_the_prefix_and_p_the_rest(
    start_engine: StartEngine, store: Store, is_async: bool, kind: str
) -> None:
    if kind == "push":
        peer = {**PULL, "kv_connector": "NixlPushConnector"}
        p = start_engine("p", is_async=is_async, kv=peer)
    else:
        peer, p = PULL, start_engine("p", is_async=is_async)
    d = start_engine("d", is_async=is_async, kv=multi(peer, kept_in("d")))
    put(d, store, 64)
    d.add("b", prompt(100), p.prefill("a", prompt(100)))
    assert finish(d, "b", p) == greedy(prompt(100), 4)
    assert store.num_loaded_blocks == 2
    assert d.loaded_tokens == 100
    settle(p, d)
    # 36 tokens of 100 came from P.
    assert (
        0
        < d.moved_bytes
        < 0.6 * sum(tensor[0].numel() * tensor.element_size() * 4 for tensor in d.tensors.values())
    )


def test_nothing_is_read_from_p_if_the_store_has_everything(
    start_engine: StartEngine, store: Store
) -> None:
    p, d = start_engine("p"), start_engine("d", kv=multi(PULL, kept_in("d")))
    put(d, store, 96)
    d.add("b", prompt(97), p.prefill("a", prompt(97)))
    assert finish(d, "b", p) == greedy(prompt(97), 4)
    assert (store.num_loaded_blocks, d.moved_bytes) == (3, 0)
    settle(p, d)


def test_a_multi_connector_with_one_child_is_that_child(
    start_engine: StartEngine,
) -> None:
    p, d = start_engine("p", kv=multi(PULL)), start_engine("d", kv=multi(PULL))
    d.add("b", prompt(100), p.prefill("a", prompt(100)))
    assert finish(d, "b", p) == greedy(prompt(100), 4)
    settle(p, d)


@pytest.mark.parametrize("kind", ["StoreConnector", "UndescribedStore"])
@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_a_failed_load_from_a_store_is_computed_and_one_of_an_undescribed_child_follows_the_policy(
    start_engine: StartEngine, store: Store, kind: str, policy: str
) -> None:
    d = start_engine("d", kv=multi(PULL, kept_in("d", kind), kv_load_failure_policy=policy))
    put(d, store, 64)
    store.fails_loads = True
    d.add("b", prompt(100))
    tokens = finish(d, "b")
    if kind == "UndescribedStore" and policy == "fail":
        assert (tokens, d.answers["b"].finish) == ([], "error")
    else:
        assert tokens == greedy(prompt(100), 4)
    settle(d)


@pytest.mark.parametrize("is_async", [False, True])
def test_blocks_that_a_store_reports_as_failed_are_computed_and_harm_no_other_request(
    start_engine: StartEngine, store: Store, is_async: bool
) -> None:
    """The store also names the first block, which vLLM has itself and which another request
    uses.
    """
    d = start_engine("d", is_async=is_async, kv=multi(PULL, kept_in("d", "BlockReportingStore")))
    put(d, store, 96)
    d.add("other", prompt(40), max_tokens=64)
    run_until(lambda: len(d.answers["other"].tokens) > 4, d)
    store.fails_loads = True
    d.add("b", prompt(100))
    assert finish(d, "b") == greedy(prompt(100), 4)
    assert finish(d, "other") == greedy(prompt(40), 64)
    settle(d)
    assert d.worker.children.disabled == d.scheduler.connector.children.disabled == {}
    store.fails_loads = False
    assert d.scheduler.reset_prefix_cache()
    d.add("c", prompt(100))
    assert finish(d, "c") == greedy(prompt(100), 4)
    settle(d)


def test_a_store_that_follows_lookups_is_asked_even_if_another_one_has_everything(
    start_engine: StartEngine, store: Store
) -> None:
    STORES["other"] = Store()
    d = start_engine("d", kv=multi(PULL, kept_in("d"), kept_in("other", "BlockReportingStore")))
    put(d, store, 96)
    d.add("b", prompt(97))
    assert finish(d, "b") == greedy(prompt(97), 4)
    assert (store.num_loaded_blocks, STORES["other"].num_loaded_blocks) == (3, 0)
    assert d.scheduler.connector.children.disabled == {}
    settle(d)


def test_one_timeout_of_a_store_that_leaves_nothing_behind_does_not_disable_it(
    start_engine: StartEngine, store: Store
) -> None:
    d = start_engine("d", kv=multi(PULL, kept_in("d", "BlockReportingStore")))
    put(d, store, 64)
    store.times_out = True
    d.add("b", prompt(100), max_tokens=1)
    finish(d, "b")
    store.times_out = False
    settle(d)
    assert d.scheduler.reset_prefix_cache()
    d.add("c", prompt(100))
    assert finish(d, "c") == greedy(prompt(100), 4)
    assert store.num_loaded_blocks > 2
    settle(d)


def test_a_failed_peer_follows_the_policy_and_frees_what_the_store_loaded(
    start_engine: StartEngine, store: Store
) -> None:
    p, d = start_engine("p"), start_engine("d", kv=multi(PULL, kept_in("d")))
    put(d, store, 64)
    params = p.prefill("a", prompt(100))
    d.add("b", prompt(100), {**params, "ticket": params["ticket"][:-2]})
    finish(d, "b", p)
    assert d.answers["b"].finish == "error"
    p.abort("a")
    d.add("c", prompt(100), params)
    finish(d, "c", p)
    settle(p, d)


@pytest.mark.parametrize("is_loaded_first", [True, False])
def test_an_abort_while_loading_frees_the_blocks_once(
    start_engine: StartEngine, store: Store, is_loaded_first: bool
) -> None:
    """One store loads, the other saves the blocks that the engine had itself."""
    STORES["other"] = Store()
    d = start_engine("d", kv=multi(PULL, kept_in("d"), kept_in("other")))
    put(d, store, 96)
    d.add("warm", prompt(32), max_tokens=1)
    finish(d, "warm")
    run_until(lambda: not d.remains(), d)
    STORES["other"].blocks.clear()
    store.holds_loads = STORES["other"].holds_saves = True
    d.add("b", prompt(100))
    wait_for_load(d, "b")
    d.step()
    d.abort("b")
    for _ in range(3):
        d.step()
    first, second = (store, STORES["other"]) if is_loaded_first else (STORES["other"], store)
    first.holds_loads = first.holds_saves = False
    for _ in range(3):
        d.step()
    assert d.remains()["used blocks"] == 3
    second.holds_loads = second.holds_saves = False
    settle(d)
    # Blocks that had not arrived were saved nowhere.
    assert len(STORES["other"].blocks) == 1
    d.add("c", prompt(100))
    assert finish(d, "c") == greedy(prompt(100), 4)
    settle(d)


def test_a_reset_voids_what_a_store_is_loading(start_engine: StartEngine, store: Store) -> None:
    d = start_engine("d", kv=multi(PULL, kept_in("d")))
    put(d, store, 64)
    store.holds_loads = True
    d.add("b", prompt(100))
    wait_for_load(d, "b")
    d.load_weights(7)
    old = dict(store.blocks)
    d.reset()
    # The load that is in progress still brings the old KV.
    store.blocks |= old
    store.holds_loads = False
    assert finish(d, "b") == greedy(prompt(100), 4, seed=7)
    assert store.num_loaded_blocks == 2
    settle(d)


# -- vLLM's own offloading --


@pytest.mark.parametrize("is_async", [False, True])
def test_vllms_offloading_gives_the_prefix_and_p_the_rest(
    start_engine: StartEngine, is_async: bool
) -> None:
    p = start_engine("p", is_async=is_async)
    d = start_engine("d", is_async=is_async, kv=multi(PULL, OFFLOADING))
    d.add("put", prompt(64), max_tokens=1)
    finish(d, "put")
    run_until(lambda: not d.remains() and not d.scheduler.has_requests(), d)
    assert d.scheduler.reset_prefix_cache()
    d.add("b", prompt(100), p.prefill("a", prompt(100)))
    assert finish(d, "b", p) == greedy(prompt(100), 4)
    assert d.loaded_tokens == 100
    settle(p, d)
    whole = sum(tensor[0].numel() * tensor.element_size() * 4 for tensor in d.tensors.values())
    assert 0 < d.moved_bytes < 0.6 * whole


# -- isolation --


@pytest.mark.parametrize(
    "call",
    [
        "on_new_request",
        "get_num_new_matched_tokens",
        "update_state_after_alloc",
        "get_external_cache_hit_sources",
        "get_loaded_kv_cache_group_ids",
        "build_connector_meta",
        "has_pending_push_work",
        "update_connector_output",
        "take_events",
        "request_finished_all_groups",
        "get_kv_connector_stats",
        "handle_preemptions",
        "bind_connector_metadata",
        "start_load_kv",
        "wait_for_save",
        "get_transfer_results",
        "get_block_ids_with_load_errors",
        "get_kv_connector_kv_cache_events",
        "build_connector_worker_meta",
        "clear_connector_metadata",
    ],
)
@pytest.mark.parametrize("has_drafter", [False, True])
@pytest.mark.parametrize("is_async", [False, True])
def test_a_child_that_raises_harms_no_request(
    start_engine: StartEngine, store: Store, call: str, is_async: bool, has_drafter: bool
) -> None:
    if not any(hasattr(base, call) for base in (KVConnectorBase_V1, SupportsHMA)):
        pytest.skip("this vLLM has no such call")
    p = start_engine("p", is_async=is_async)
    kv = multi(PULL, kept_in("d"))
    d = start_engine("d", is_async=is_async, has_drafter=has_drafter, kv=kv)
    put(d, store, 64)
    store.raising, store.calls = {call}, set()
    for name in ("b", "c", "e", "f"):
        assert d.scheduler.reset_prefix_cache()
        d.add(name, prompt(100), p.prefill(f"p of {name}", prompt(100)))
        assert finish(d, name, p) == greedy(prompt(100), 4)
        settle(p, d)
        # An idle engine asks whether a step is needed.
        d.step()
    assert call in store.calls
    assert d.moved_bytes > 0


# -- dummy KV --


def test_dummy_kv_of_decode_bench_is_never_saved(start_engine: StartEngine, store: Store) -> None:
    d = start_engine("d", kv=multi(PULL, kept_in("d"), DUMMY))
    assert d.worker.children[2].traits.provides_dummy_kv
    for name in ("b", "c"):
        # The second request finds the first one's blocks in vLLM's prefix cache.
        d.add(name, prompt(100), {"do_remote_decode": True})
        finish(d, name)
        assert d.answers[name].params is None
    assert {request for request, _ in d.wrong_slots} == {"b", "c"}
    d.wrong_slots.clear()
    settle(d)
    assert store.blocks == {}


# -- what a connector of vLLM is shown --


class Recorder:
    """A connector that is shown steps, and loads for the request `loads`."""

    def update_state_after_alloc(self, request: Any, blocks: Any, count: int) -> None: ...

    def build_connector_meta(self, step: Any) -> set[str]:
        assert set(step.num_scheduled_tokens) == {new.req_id for new in step.scheduled_new_reqs}
        return set(step.num_scheduled_tokens)


@pytest.mark.parametrize(
    ("saves_in_first_step", "shown"),
    [(True, {"whole", "loads"}), (False, {"whole", "part", "loads"})],
)
def test_a_child_that_saves_in_the_first_step_sees_no_request_computed_in_part(
    model: Path, saves_in_first_step: bool, shown: set[str]
) -> None:
    child = VllmChild(Recorder(), saves_in_first_step=saves_in_first_step)
    # The child expects the message of a request that it loads for.
    request = VllmRequestView(
        SimpleNamespace(request_id="loads"), CacheSalts.from_config(_config(model, multi(PULL)))
    )
    child.update_state_after_alloc(request, BlocksView(None), 32)
    counts = {"whole": 64, "part": 32, "loads": 32, "hidden": 64}
    step = SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, num_computed_tokens=0, prompt_token_ids=prompt(64))
            for name in counts
        ],
        scheduled_cached_reqs=CachedRequestData.make_empty(),
        num_scheduled_tokens=counts,
        scheduled_spec_decode_tokens={},
        scheduled_encoder_inputs={},
    )
    assert child.build_connector_meta(LimitedStep(VllmStep(step, ()), {"hidden"})) == shown


# -- configuration --


def test_a_plain_name_means_our_connector_and_a_module_path_vllms(model: Path) -> None:
    def classes(*children: dict[str, Any]) -> list[Any]:
        config = _config(model, multi(*children))
        return [child.connector_class for child in child_configs(config)]

    assert classes(PULL, DUMMY)[0] is KVFerryConnector
    assert classes(STOCK_NIXL)[0].__module__.startswith("vllm.")
    assert classes(DUMMY)[0].__module__.startswith("vllm.")


@pytest.mark.parametrize("name", ["LMCacheConnectorV1", "LMCacheMPConnector"])
def test_a_connector_whose_package_is_missing_says_what_to_install(model: Path, name: str) -> None:
    config = copy(_config(model, multi(PULL)))
    config.scheduler_config = copy(config.scheduler_config)
    config.scheduler_config.disable_hybrid_kv_cache_manager = True
    child = {"kv_connector": name, "kv_role": "kv_both"}
    config.kv_transfer_config = KVTransferConfig(**{**multi(child), "kv_role": "kv_both"})
    with pytest.raises(ConfigError, match=f"{name} cannot be loaded .* it needs "):
        MultiConnector(config, KVConnectorRole.SCHEDULER, KVCacheConfig(1, [], []))


def _config(model: Path, kv: dict[str, Any]) -> Any:
    return vllm_config(str(model), "d", json.dumps({"kv": kv}, sort_keys=True))


def test_vllm_finds_the_class_by_its_name(model: Path) -> None:
    transfer = _config(model, multi(PULL, kept_in("d"))).kv_transfer_config
    assert KVConnectorFactory.get_connector_class(transfer) is MultiConnector
    assert KVConnectorFactory.supports_hma_config(transfer)
    assert transfer.has_connector("NixlConnector")


def test_the_role_of_the_multi_connector_includes_its_childrens(model: Path) -> None:
    config = copy(_config(model, multi(PULL)))
    config.kv_transfer_config = KVTransferConfig(**{**multi(PULL), "kv_role": "kv_producer"})
    with pytest.raises(ConfigError, match="the MultiConnector is kv_producer"):
        child_configs(config)


@pytest.mark.parametrize(
    ("children", "sentence"),
    [
        ([PULL, PULL], r"NixlConnector\[0\] and NixlConnector\[1\], but an engine has one side"),
        ([PULL, STOCK_NIXL], "but an engine has one side channel"),
        ([PULL, MORIIO], "but an engine has one side channel"),
        ([{**PULL, "engine_id": "x"}], r'connectors\[0\].engine_id is "x"'),
        ([{**PULL, "kv_load_failure_policy": "recompute"}], "share its kv_load_failure_policy"),
        ([{**PULL, "kv_conector": 1}], "kv_conector is not a setting of"),
        ([{**PULL, "kv_connector": "MultiConnector"}], "inside a MultiConnector"),
        ([], "must be a list of objects"),
        ([3], r"connectors\[0\] must be an object"),
        ([PULL, {**PULL, "kv_connector": "Nope"}], r"connectors\[1\] cannot be used: Unsupported"),
        ([{**PULL, "kv_role": "kv_x"}], r"connectors\[0\] cannot be used: .*kv_role Input should"),
        ([{**PULL, "kv_connector_extra_config": [1]}], r"connectors\[0\] cannot be used: 'list'"),
        ([{**PULL, "kv_connector_module_path": "no.such"}], r"\[0\] cannot be used: No module"),
    ],
)
def test_children_that_cannot_work_are_refused(
    model: Path, children: list[Any], sentence: str
) -> None:
    transfer = {
        **multi(PULL),
        "kv_connector_extra_config": {"connectors": children},
        "engine_id": "d",
    }
    config = copy(_config(model, multi(PULL)))
    config.kv_transfer_config = KVTransferConfig(**{**transfer, "kv_role": "kv_both"})
    with pytest.raises(ConfigError, match=sentence):
        MultiConnector.get_required_kvcache_layout(config)


# -- statistics --


def test_the_stats_of_each_child_reach_the_page_under_its_name(
    start_engine: StartEngine, store: Store, model: Path
) -> None:
    kv = multi(PULL, kept_in("d"))
    p, d = start_engine("p"), start_engine("d", kv=kv)
    shown = _Page(_config(model, {**kv, "engine_id": "d"}))
    store.raising = {"take_events"}
    d.add("b", prompt(100), p.prefill("a", prompt(100)))
    told = []
    taken = d.scheduler.make_stats

    def make_stats(*args: Any, **more: Any) -> Any:
        told.append(taken(*args, **more))
        return told[-1]

    d.scheduler.make_stats = make_stats
    finish(d, "b", p)
    settle(p, d)
    for stats in told:
        if stats is not None and stats.kv_connector_stats:
            shown.metrics.observe(stats.kv_connector_stats)
            rebuilt = MultiConnector.build_kv_connector_stats(stats.kv_connector_stats)
            assert rebuilt.aggregate(MultiConnector.build_kv_connector_stats()).reduce()
    page = generate_latest(shown.registry).decode()
    assert 'kvferry:child_failures_total{child="StoreConnector"' in page
    assert 'kvferry:transfers_total{engine="0",model_name="m",transport="tcp"} 1.0' in page
    assert read_metrics(page.encode()).side_channel.startswith("127.0.0.1:")


def test_stores_of_kvferry_that_have_the_same_metrics_are_told_apart_by_the_label_child(
    model: Path,
) -> None:
    names = ("OffloadingConnector", "DecodeBenchConnector", "ExampleConnector")
    children = [{"kv_connector": name, "kv_role": "kv_both"} for name in names]
    shown = _Page(_config(model, {**multi(*children), "engine_id": "d"}))
    page = generate_latest(shown.registry).decode()
    for name in names:
        assert f'kvferry:offload_queried_tokens_total{{child="{name}"' in page


class _Page:
    """The metrics page of vLLM's front-end."""

    def __init__(self, config: Any) -> None:
        self.registry = CollectorRegistry()
        types = {
            kind: partial(kind, registry=self.registry) for kind in (Counter, Gauge, Histogram)
        }
        self.metrics = MultiConnector.build_prom_metrics(
            config, types, ["model_name", "engine"], {0: ["m", "0"]}
        )
