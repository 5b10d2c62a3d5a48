"""`MultiConnector` inside vLLM: `"kv_connector": "MultiConnector", "kv_connector_module_path":
"kvferry.vllm"`.

The children are pairs of sides: kvferry's own, or a connector for vLLM in a `VllmChild`. The
decisions are in `kvferry.connectors.multi`; this module reads vLLM's configuration and builds the
children. vLLM recognises a MultiConnector by its name, so the class must have that name. See
docs/decisions/053-multi-connector.md.
"""

import logging
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from copy import copy
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from kvferry import vllm as our_package
from kvferry.config import MultiExtraConfig
from kvferry.config.fields import Seconds, converted, refuse_unknown_keys, shown
from kvferry.connectors.contract import ConnectorDescription
from kvferry.connectors.factory import ONLY_IN_VLLM
from kvferry.connectors.multi.connector import (
    build_children,
    check_children,
    name_children,
    traits_of,
)
from kvferry.connectors.multi.lookup import ChildTraits
from kvferry.connectors.multi.metadata import split_handshakes
from kvferry.connectors.multi.scheduler import MultiScheduler
from kvferry.connectors.multi.worker import MultiWorker
from kvferry.errors import ConfigError
from kvferry.vllm.child import VllmChild
from kvferry.vllm.compatibility import drops_too_few_tokens
from kvferry.vllm.connector import KVFerryConnector, log_with_vllm
from kvferry.vllm.engine.states import state_specs
from kvferry.vllm.metrics.multi import MultiKVStats, MultiPromMetrics

NAME = "MultiConnector"
OWN_PACKAGE = "kvferry.vllm"
BETWEEN_ENGINES = (
    "vllm.distributed.kv_transfer.kv_connector.v1.moriio",
    "vllm.distributed.kv_transfer.kv_connector.v1.nixl",
)
"""The modules of vLLM's own connectors between engines."""
KNOWN_TRAITS: Mapping[str, ChildTraits] = {
    "OffloadingConnector": ChildTraits(0, honours_token_range=True, loads_are_optional=True),
    "MooncakeStoreConnector": ChildTraits(0, honours_token_range=True, loads_are_optional=True),
    "DecodeBenchConnector": ChildTraits(0, provides_dummy_kv=True),
    "ExampleConnector": ChildTraits(0, names_kv_by_tokens_only=True),
    "LMCacheConnectorV1": ChildTraits(0, loads_are_optional=True, follows_lookups=True),
    "LMCacheMPConnector": ChildTraits(
        0,
        honours_token_range=True,
        loads_are_optional=True,
        reports_failed_blocks=True,
        follows_lookups=True,
        store_timeouts_are_harmless=True,
    ),
}
"""What is known of the connectors of vLLM and LMCache, which cannot say it themselves."""
SAVE_IN_FIRST_STEP = ("ExampleConnector",)
"""Connectors of vLLM that save a prompt in the first step of its request, computed or not."""
DEFAULT_SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "LMCacheMPConnector": {"lmcache.mp.mq_timeout": 5.0, "lmcache.mp.heartbeat_interval": 2.0}
}
"""Settings of children whose own defaults would let a dead server block the engine's thread for
minutes (docs/decisions/053-multi-connector.md). An operator's setting takes precedence.
"""

_log = logging.getLogger(__name__)


# -- configuration --


@dataclass(frozen=True)
class ChildConfig:
    """The class of a child and the configuration that it is built from."""

    name: str
    connector_class: Any
    vllm_config: Any

    @property
    def is_own(self) -> bool:
        """Whether the class only describes sides of kvferry."""
        found = self.connector_class
        return isinstance(found, type) and issubclass(found, KVFerryConnector)

    @property
    def known_name(self) -> str:
        """The name of a connector of vLLM or LMCache; empty for any other."""
        is_known = str(self.connector_class.__module__).startswith(("vllm.", "lmcache."))
        return self.connector_class.__name__ if is_known else ""

    @property
    def description(self) -> ConnectorDescription:
        """One of kvferry's connectors."""
        found: ConnectorDescription = self.connector_class.describe(self.vllm_config)
        return found

    @property
    def opens_side_channel(self) -> bool:
        if self.is_own:
            return self.description.opens_side_channel
        return str(self.connector_class.__module__).startswith(BETWEEN_ENGINES)

    def traits(self, index: int) -> ChildTraits:
        """How the child may be combined with others."""
        if self.is_own:
            return traits_of(index, self.description)
        stated = traits_of(index, self.connector_class)
        known = KNOWN_TRAITS.get(self.known_name, stated)
        return replace(known, index=index, needs_polling=True)


def child_configs(vllm_config: Any) -> list[ChildConfig]:
    """The children that a configuration lists; `ConfigError` names a wrong key."""
    found = _found(vllm_config.kv_transfer_config)
    names = name_children([str(transfer.kv_connector) for transfer, _ in found])
    configs = []
    for name, (transfer, connector_class) in zip(names, found, strict=True):
        child = copy(vllm_config)
        child.kv_transfer_config = transfer
        configs.append(ChildConfig(name, connector_class, child))
    return configs


def _found(parent: Any) -> list[tuple[Any, Any]]:
    """The transfer configurations and the classes of the children."""
    found = []
    for index, entry in enumerate(_listed(parent.kv_connector_extra_config)):
        with _naming_child(index):
            transfer = _child_transfer(parent, index, entry)
            with _naming_missing_package(transfer.kv_connector):
                found.append((transfer, KVConnectorFactory.get_connector_class(transfer)))
    return found


@contextmanager
def _naming_child(index: int) -> Iterator[None]:
    """Let an error of vLLM about a child's settings say which child it is."""
    try:
        yield
    except (ImportError, TypeError, ValueError) as error:
        # pydantic's messages have several lines.
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"kv_connector_extra_config.connectors[{index}] cannot be used: {reason}"
        ) from error


@contextmanager
def _naming_missing_package(connector: str) -> Iterator[None]:
    """Let the `ImportError` of a connector that needs another package say which one."""
    try:
        yield
    except ImportError as error:
        need = ONLY_IN_VLLM.get(connector)
        if need is None:
            raise
        raise ConfigError(
            f"{connector} cannot be loaded ({error}); in vLLM's environment it needs {need}"
        ) from error


def _listed(extra: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    path = "kv_connector_extra_config"
    listed = extra.get("connectors")
    if not isinstance(listed, list) or not listed:
        raise ConfigError(f"{path}.connectors must be a list of objects, got {shown(listed)}")
    for index, entry in enumerate(listed):
        if not isinstance(entry, Mapping):
            raise ConfigError(f"{path}.connectors[{index}] must be an object, got {shown(entry)}")
    return listed


def _child_transfer(parent: Any, index: int, entry: Mapping[str, Any]) -> Any:
    """One child's transfer configuration. A name of kvferry's connectors means kvferry's."""
    path = f"kv_connector_extra_config.connectors[{index}]"
    shared = {
        "engine_id": parent.engine_id,
        "kv_load_failure_policy": parent.kv_load_failure_policy,
    }
    for key, value in shared.items():
        if entry.get(key, value) != value:
            raise ConfigError(
                f"{path}.{key} is {shown(entry[key])}, but all connectors of a MultiConnector "
                f"share its {key}; remove it"
            )
    role = entry.get("kv_role")
    if parent.kv_role not in ("kv_both", role):
        # vLLM protects the blocks of loads and sends as the role of the whole connector demands.
        raise ConfigError(
            f"{path}.kv_role is {shown(role)}, but that of the MultiConnector is "
            f"{parent.kv_role}; give the MultiConnector the kv_role kv_both"
        )
    refuse_unknown_keys(entry, [field.name for field in fields(KVTransferConfig)], path)
    name, module = entry.get("kv_connector"), entry.get("kv_connector_module_path")
    if name == NAME:
        raise ConfigError(
            f"{path}.kv_connector cannot be MultiConnector inside a MultiConnector; list its "
            "connectors here instead"
        )
    if module is None and name in our_package.__all__:
        module = OWN_PACKAGE
    own = entry.get("kv_connector_extra_config") or {}
    settings = {
        "kv_connector_extra_config": {**DEFAULT_SETTINGS.get(str(name), {}), **own},
        "kv_connector_module_path": module,
    }
    return KVTransferConfig(**{**entry, **shared, **settings})


def _lookup_timeout_s(extra: Mapping[str, Any]) -> float:
    refuse_unknown_keys(extra, [field.name for field in fields(MultiExtraConfig)], NAME)
    value = extra.get("lookup_timeout", MultiExtraConfig.lookup_timeout)
    return float(converted("kv_connector_extra_config.lookup_timeout", value, Seconds))


def _check(configs: Collection[ChildConfig]) -> str | None:
    """Check that the children can work together, and return the layout that they require."""
    return check_children(
        [child.name for child in configs],
        [index for index, child in enumerate(configs) if child.opens_side_channel],
        [child.connector_class.get_required_kvcache_layout(child.vllm_config) for child in configs],
    )


# -- connector --


class MultiConnector(KVFerryConnector):
    """Several connectors in one engine."""

    @classmethod
    def has_own_sides(cls, vllm_config: Any) -> bool:
        return any(child.is_own for child in child_configs(vllm_config))

    def _make_side(self) -> MultiScheduler | MultiWorker:
        vllm_config, kv_cache_config = self._vllm_config, self._kv_cache_config
        timeout_s = _lookup_timeout_s(vllm_config.kv_transfer_config.kv_connector_extra_config)
        self._configs = child_configs(vllm_config)
        _check(self._configs)
        traits = [child.traits(index) for index, child in enumerate(self._configs)]
        if state_specs(*kv_cache_config.kv_cache_groups):
            # The states at the end of a range that another child continues have no block.
            traits = [replace(each, honours_token_range=False) for each in traits]
        self.children = build_children(
            [child.name for child in self._configs],
            traits,
            [partial(self._make_child, child) for child in self._configs],
            vllm_config.parallel_config.world_size,
        )
        if self._role is KVConnectorRole.WORKER:
            return MultiWorker(self.children, len(kv_cache_config.kv_cache_groups))
        return MultiScheduler(
            self.children,
            vllm_config.cache_config.block_size,
            timeout_s,
            may_load_within_steps=not drops_too_few_tokens(vllm_config),
        )

    def _make_child(self, child: ChildConfig) -> Any:
        if child.is_own:
            return self._make_own_side(child.connector_class, child.vllm_config)
        with _naming_missing_package(child.vllm_config.kv_transfer_config.kv_connector):
            connector = KVConnectorFactory.create_connector(
                child.vllm_config, self._role, self._kv_cache_config
            )
        return VllmChild(connector, saves_in_first_step=child.known_name in SAVE_IN_FIRST_STEP)

    @property
    def _vllm_children(self) -> dict[int, VllmChild]:
        """The children that are no sides of kvferry, by index."""
        sides = {child.index: child.side for child in self.children}
        return {index: side for index, side in sides.items() if isinstance(side, VllmChild)}

    def get_kv_connector_stats(self) -> MultiKVStats | None:
        self._has_unreported_stats = False
        stats, parts = MultiKVStats(), self.children.take_stats()
        for child in self._configs:
            if child.name in parts:
                part, found = parts[child.name], child.connector_class
                if child.is_own:
                    part = found.build_kv_connector_stats(part.to_dict())
                stats.add(child.name, found, part)
        stats.counts = self.children.take_counts()
        return None if stats.is_empty() else stats

    # -- scheduler --

    @property
    def requires_kv_delivery(self) -> bool:
        return any(side.requires_kv_delivery for side in self._vllm_children.values()) or any(
            child.vllm_config.kv_transfer_config.is_kv_producer
            and child.description.requires_kv_delivery
            for child in self._configs
            if child.is_own
        )

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        return len(self._vllm_children) == len(self.children) and all(
            getattr(side.connector, "supports_divergent_local_hybrid_hits", False)
            for side in self._vllm_children.values()
        )

    def get_finished_count(self) -> int | None:
        counts = [side.get_finished_count() for side in self._vllm_children.values()]
        return counts[0] if counts and len(self.children) == 1 else None

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        if self._has_own_sides:
            super().set_xfer_handshake_metadata_pp_aware(metadata)
            return
        parts = split_handshakes({rank: part.inner for rank, part in metadata.items()})
        for child, by_rank in parts.items():
            self._vllm_children[child].set_xfer_handshake_metadata_pp_aware(by_rank)

    # -- worker --

    def get_mem_pool_context(self) -> AbstractContextManager[Any] | None:
        contexts = {
            self.children[index].name: side.get_mem_pool_context()
            for index, side in self._vllm_children.items()
        }
        given = {name: context for name, context in contexts.items() if context is not None}
        if len(given) > 1:
            raise ConfigError(
                f"{' and '.join(given)} both allocate the KV cache, but an engine has one; "
                "remove one of them"
            )
        return next(iter(given.values()), None)

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        for side in self._vllm_children.values():
            side.kv_caches = kv_caches
        super().register_kv_caches(kv_caches)

    def set_host_xfer_buffer_ops(self, copy_operation: Any) -> None:
        for side in self._vllm_children.values():
            side.set_host_xfer_buffer_ops(copy_operation)

    # -- class methods --

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        return _check(child_configs(vllm_config))

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        parent = KVTransferConfig(
            kv_connector=NAME, kv_role="kv_both", kv_connector_extra_config=extra_config
        )
        return any(
            found.requires_piecewise_for_cudagraph(child.kv_connector_extra_config)
            for child, found in _found(parent)
        )

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        refusing = [
            child.kv_connector
            for child, found in _found(kv_transfer_config)
            if not found.supports_sleep_mode(child)
        ]
        if refusing:
            log_with_vllm()
            _log.error("sleep mode refused connectors=%s", ",".join(refusing))
        return not refusing

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> MultiKVStats:
        return MultiKVStats.from_dict(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> MultiPromMetrics:
        return MultiPromMetrics(
            vllm_config,
            metric_types,
            labelnames,
            per_engine_labelvalues,
            [
                (child.name, child.connector_class, child.vllm_config)
                for child in child_configs(vllm_config)
            ],
        )
