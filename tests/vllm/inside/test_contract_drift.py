"""Tests vLLM's connector interface against ours: a method that is added, removed or changed
upstream fails here with a sentence that names it.
"""

import inspect
from dataclasses import fields
from importlib import import_module
from typing import Any

import pytest
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.outputs import KVConnectorOutput

import vllm
from kvferry.connectors import contract
from kvferry.vllm import (
    KVFerryConnector,
    KVFerryMooncakeConnector,
    KVFerryPushConnector,
    MultiConnector,
    NixlConnector,
    NixlPushConnector,
    OffloadingConnector,
)
from kvferry.vllm.release import TESTED, release

DEFAULT_IS_RIGHT = {
    "bind_gpu_block_pool": "we never touch the engine's block counts",
    "get_finished": "only vLLM's default of get_transfer_results, which we replace, calls it",
    "get_finished_count": "every rank reports every request",
    "get_mem_pool_context": "the engine's own memory will do",
    "has_connector_metadata": "it reads what bind_connector_metadata of the base class has stored",
    "requires_piecewise_for_cudagraph": "nothing of ours happens per layer",
    "role": "as given to the base class",
    "set_host_xfer_buffer_ops": "we have no staging buffer in host memory",
    "set_xfer_handshake_metadata_pp_aware": "pipeline parallelism is refused at "
    "start-up; it unwraps to the plain form",
    "supports_divergent_local_hybrid_hits": "models with recurrent state are refused at start-up",
}

NEW_IN = {
    "get_external_cache_hit_sources": "0.32",
    "get_loaded_kv_cache_group_ids": "0.32",
    "restore_kv_caches": "0.33",
    "supports_sleep_mode": "0.33",
    "unregister_kv_caches": "0.33",
}
"""The releases that brought names which the oldest tested release does not have yet."""
RELEASES = [release(version) for version in TESTED]
NOT_YET = {
    name
    for name, first in NEW_IN.items()
    if first in RELEASES[RELEASES.index(release(vllm.__version__)) + 1 :]
}
"""The names that the installed release does not have yet."""

KVFERRY_ONLY = {
    "expect_request",
    "has_urgent_work",
    "needs_slices",
    "publish_events",
    "request_finished_all_groups",
    "withdraw",
    "prefer_cross_layer_blocks",
    "register_cross_layers_kv_cache",
    "request_abandoned",
    "set_wakeup",
    "reclaim_blocks",
    "set_weights_version",
    "honours_token_range",
    "loads_are_optional",
    "moves_states",
    "needs_polling",
    "opens_side_channel",
    "provides_dummy_kv",
}
OUR_OWN_HOOKS = {"check_config", "describe", "has_own_sides", "registration"}
"""Called by kvferry: what differs between its connectors."""


def public_names(of: type) -> set[str]:
    return {name for name in dir(of) if not name.startswith("_")}


def is_overridden(ours: type, base: type, name: str) -> bool:
    theirs = inspect.getattr_static(base, name)
    return inspect.getattr_static(ours, name, theirs) is not theirs


def signature_drift(name: str, ours: Any, base: Any) -> list[str]:
    """Return why a call written for `base` may not work with `ours`; empty if every call does."""
    theirs, mine = (list(inspect.signature(each).parameters.values()) for each in (base, ours))
    problems = []
    named = [
        parameter
        for parameter in theirs
        if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    ]
    for index, parameter in enumerate(named):
        twin = mine[index] if index < len(mine) else None
        if twin is None or twin.name != parameter.name:
            found = "nothing" if twin is None else twin.name
            problems.append(
                f"{name}: parameter {index} is {parameter.name} in vLLM and {found} in ours"
            )
        elif parameter.default is not parameter.empty and twin.default is twin.empty:
            problems.append(f"{name}: {parameter.name} has a default in vLLM and none in ours")
    for kind in (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL):
        if any(parameter.kind is kind for parameter in theirs) and not any(
            parameter.kind is kind for parameter in mine
        ):
            problems.append(f"{name}: vLLM may pass more ({kind.description}), ours takes no more")
    for parameter in mine[len(named) :]:
        if parameter.default is parameter.empty and parameter.kind not in (
            parameter.VAR_KEYWORD,
            parameter.VAR_POSITIONAL,
        ):
            problems.append(f"{name}: ours wants {parameter.name}, which vLLM does not pass")
    return problems


def drift(ours: type, base: type) -> list[str]:
    problems = [
        f"{name} is abstract in vLLM and not in ours"
        for name in sorted(getattr(ours, "__abstractmethods__", ()))
    ]
    for name in sorted(public_names(base)):
        if not is_overridden(ours, base, name):
            if name not in DEFAULT_IS_RIGHT:
                problems.append(
                    f"{name} is new in vLLM: override it, or say in DEFAULT_IS_RIGHT why its "
                    "default is right"
                )
            continue
        mine, theirs = getattr(ours, name), getattr(base, name)
        if callable(mine) != callable(theirs):
            problems.append(f"{name} is a method on one side and a property on the other")
        elif callable(mine):
            problems += signature_drift(name, mine, theirs)
    overrides = {
        name for name in vars(ours) if not name.startswith("_") and callable(getattr(ours, name))
    }
    known = public_names(base) | public_names(SupportsHMA) | OUR_OWN_HOOKS | NOT_YET
    return problems + [
        f"{name} of ours is not called by this vLLM any more" for name in sorted(overrides - known)
    ]


@pytest.mark.parametrize(
    "ours",
    [
        NixlConnector,
        KVFerryConnector,
        NixlPushConnector,
        KVFerryPushConnector,
        OffloadingConnector,
        MultiConnector,
    ],
)
def test_our_connector_suits_every_call_of_this_vllm(ours: type) -> None:
    assert drift(ours, KVConnectorBase_V1) == []
    hma = signature_drift(
        "request_finished_all_groups",
        ours.request_finished_all_groups,  # type: ignore[attr-defined]
        SupportsHMA.request_finished_all_groups,
    )
    assert hma == []


def test_tokens_we_load_are_counted_as_a_peers() -> None:
    """vllm:prompt_tokens_cached_by_source counts them like those of vLLM's own connectors between
    engines. vLLM has that metric since 0.32.
    """
    # The attribute's name is vLLM's; subclasses set it.
    source = KVFerryConnector._cache_hit_source  # noqa: SLF001
    if "get_external_cache_hit_sources" in NOT_YET:
        assert source is None
        assert not hasattr(KVConnectorBase_V1, "_cache_hit_source")
    else:
        assert source is import_module("vllm.v1.metrics.cache_hit_source").CacheHitSource.P2P


def test_the_table_of_defaults_names_nothing_that_is_gone() -> None:
    assert set(DEFAULT_IS_RIGHT) - public_names(KVConnectorBase_V1) <= NOT_YET


class Doctored(KVConnectorBase_V1):  # type: ignore[misc]
    """A connector interface as a later vLLM might have it."""

    def on_brand_new_thing(self) -> None:
        return None

    def request_finished(
        self, request: Any, block_ids: list[int], reason: str
    ) -> tuple[bool, None]:
        return False, None

    def update_state_after_alloc(self, request: Any, num_external_tokens: int, blocks: Any) -> None:
        return None

    def shutdown(self, patience_s: float = 1.0) -> None:
        return None

    def wait_for_save(self, **kwargs: Any) -> None:
        return None

    @property
    def on_new_request(self) -> bool:
        return True


def test_an_upstream_that_has_moved_on_is_noticed() -> None:
    """The control: every kind of change is reported with a sentence."""
    found = [problem for problem in drift(KVFerryConnector, Doctored) if "abstract" not in problem]
    assert found == [
        "on_brand_new_thing is new in vLLM: override it, or say in DEFAULT_IS_RIGHT why its "
        "default is right",
        "on_new_request is a method on one side and a property on the other",
        "request_finished: parameter 3 is reason in vLLM and nothing in ours",
        "shutdown: parameter 1 is patience_s in vLLM and nothing in ours",
        "update_state_after_alloc: parameter 2 is num_external_tokens in vLLM and blocks in ours",
        "update_state_after_alloc: parameter 3 is blocks in vLLM and num_external_tokens in ours",
        "wait_for_save: vLLM may pass more (variadic keyword), ours takes no more",
    ]


def test_a_method_of_ours_that_nobody_calls_is_noticed() -> None:
    class Outdated(KVFerryConnector):  # type: ignore[misc]
        def register_cross_layers_kv_cache(self, kv_cache: Any) -> None:
            return None

    assert drift(Outdated, KVConnectorBase_V1) == [
        "register_cross_layers_kv_cache of ours is not called by this vLLM any more"
    ]


def test_our_own_contract_has_the_names_of_vllms() -> None:
    assert (
        public_names(contract.KVConnectorBase_V1) - public_names(KVConnectorBase_V1)
        == KVFERRY_ONLY | NOT_YET
    )
    assert public_names(KVConnectorBase_V1) - public_names(contract.KVConnectorBase_V1) == set()
    theirs, ours = (
        KVConnectorBase_V1.__abstractmethods__,
        contract.KVConnectorBase_V1.__abstractmethods__,
    )
    assert theirs == ours


@pytest.mark.parametrize(
    ("theirs", "ours", "only_ours"),
    [
        (
            KVConnectorTransferResults,
            contract.KVConnectorTransferResults,
            {"failure_reasons", "given_up_recving", "optional_failures", "recving_times"},
        ),
        (
            KVConnectorOutput,
            contract.KVConnectorOutput,
            {"failure_reasons", "given_up_recving", "optional_failures", "recving_times"},
        ),
    ],
)
def test_results_have_the_fields_we_translate(
    theirs: type, ours: type, only_ours: set[str]
) -> None:
    assert {field.name for field in fields(ours)} - {
        field.name for field in fields(theirs)
    } == only_ours
    assert {field.name for field in fields(theirs)} - {
        field.name for field in fields(ours)
    } == set()


def test_roles_are_the_same() -> None:
    assert {role.name: role.value for role in KVConnectorRole} == {
        role.name: role.value for role in contract.KVConnectorRole
    }


NAMES = {
    "NixlConnector": KVFerryConnector,
    "KVFerryConnector": KVFerryConnector,
    "NixlPushConnector": KVFerryPushConnector,
    "KVFerryPushConnector": KVFerryPushConnector,
    "MooncakeConnector": KVFerryMooncakeConnector,
}


@pytest.mark.parametrize("name", NAMES)
def test_vllms_factory_finds_us_by_module_path(name: str) -> None:
    transfer = KVTransferConfig(
        kv_connector=name, kv_connector_module_path="kvferry.vllm", kv_role="kv_both"
    )
    assert KVConnectorFactory.get_connector_class(transfer) is NAMES[name]
    assert KVConnectorFactory.supports_hma_config(transfer)


@pytest.mark.parametrize("ours", [KVFerryConnector, KVFerryPushConnector])
def test_vllms_factory_finds_us_by_name_once_the_plugin_has_run(ours: type) -> None:
    """By the class's own name: vLLM's MultiConnector looks up its children by that name."""
    from kvferry.vllm.plugin import register

    register()
    register()
    assert (
        KVConnectorFactory.get_connector_class(
            KVTransferConfig(kv_connector=ours.__name__, kv_role="kv_both")
        )
        is ours
    )
