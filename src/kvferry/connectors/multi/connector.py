"""`MultiConnector`: builds the sides of its children, and the two sides that combine them
(`scheduler.py`, `worker.py`).
"""

import dataclasses
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from kvferry.config import KVTransferConfig, MultiExtraConfig
from kvferry.connectors.contract import ConnectorConfig, ConnectorDescription, KVCacheConfig
from kvferry.connectors.factory import KVConnectorFactory, check_cache
from kvferry.connectors.multi.children import Child, Children
from kvferry.connectors.multi.lookup import ChildTraits
from kvferry.connectors.multi.scheduler import MultiScheduler
from kvferry.connectors.multi.worker import MultiWorker
from kvferry.errors import ConfigError


def traits_of(index: int, facts: object) -> ChildTraits:
    """How a child may be combined with others, by the attributes of its description or class."""
    names = [each.name for each in dataclasses.fields(ChildTraits) if each.name != "index"]
    return ChildTraits(index, **{name: bool(getattr(facts, name, False)) for name in names})


def name_children(names: Sequence[str]) -> list[str]:
    """Unique names for logs and metrics: the class name, with the index if it appears twice."""
    return [
        f"{name}[{index}]" if names.count(name) > 1 else name for index, name in enumerate(names)
    ]


def check_children(
    names: Sequence[str], with_side_channel: Collection[int], layouts: Sequence[str | None]
) -> str | None:
    """Raise `ConfigError` if the children cannot work together. Returns the cache layout that they
    require, if any.
    """
    if len(with_side_channel) > 1:
        listed = " and ".join(names[child] for child in sorted(with_side_channel))
        raise ConfigError(
            f"connectors lists {listed}, but an engine has one side channel and a request one set "
            "of transfer parameters, so only one of them can transfer KV between engines; remove "
            "the others"
        )
    required = [(name, layout) for name, layout in zip(names, layouts, strict=True) if layout]
    for name, layout in required[1:]:
        first_name, first_layout = required[0]
        if layout != first_layout:
            raise ConfigError(
                f"{first_name} requires the KV cache layout {first_layout} and {name} requires "
                f"{layout}, but an engine has one cache; remove one of the connectors"
            )
    return required[0][1] if required else None


def build_children(
    names: Sequence[str],
    traits: Sequence[ChildTraits],
    makers: Sequence[Callable[[], Any]],
    num_ranks: int,
) -> Children:
    """Build the sides of all children. If one cannot be built, the others are shut down."""
    children: list[Child] = []
    with ExitStack() as undo:
        undo.callback(lambda: [child.close() for child in children])
        for name, each, make in zip(names, traits, makers, strict=True):
            child = Child(make(), name, each)
            children.append(child)
            # A connector of vLLM may report its transfers on some ranks only. A rank cannot know
            # which of its children will report.
            count = getattr(child.side, "get_finished_count", lambda: None)()
            if count not in (None, num_ranks) and len(names) > 1:
                raise ConfigError(
                    f"{name} reports its transfers on {count} of {num_ranks} ranks only, so it "
                    "cannot be combined with other connectors"
                )
        undo.pop_all()
    return Children(children)


def _build(
    config: ConnectorConfig,
    cache: KVCacheConfig,
    make_side: Callable[[ConnectorDescription, ConnectorConfig, KVCacheConfig], Any],
) -> Children:
    configs = [
        dataclasses.replace(config, kv_transfer=transfer)
        for transfer in _settings(config.kv_transfer).connectors
    ]
    names = name_children([child.kv_transfer.kv_connector for child in configs])
    found = [KVConnectorFactory.describe(child.kv_transfer) for child in configs]
    check_children(
        names,
        [index for index, each in enumerate(found) if each.opens_side_channel],
        [each.required_layout(child) for each, child in zip(found, configs, strict=True)],
    )

    def make(description: ConnectorDescription, child: ConnectorConfig) -> Any:
        check_cache(child.kv_transfer.kv_connector, description, cache)
        return make_side(description, child, cache)

    return build_children(
        names,
        [traits_of(index, each) for index, each in enumerate(found)],
        [partial(make, each, child) for each, child in zip(found, configs, strict=True)],
        config.parallel.tp_size,
    )


def _make_scheduler(config: ConnectorConfig, cache: KVCacheConfig) -> MultiScheduler:
    children = _build(config, cache, lambda child, *args: child.make_scheduler(*args))
    timeout_s = _settings(config.kv_transfer).lookup_timeout
    return MultiScheduler(children, cache.block_size, timeout_s)


def _make_worker(config: ConnectorConfig, cache: KVCacheConfig) -> MultiWorker:
    children = _build(config, cache, lambda child, *args: child.make_worker(*args))
    return MultiWorker(children, len(cache.groups))


def _settings(transfer: KVTransferConfig) -> MultiExtraConfig:
    assert isinstance(transfer.extra, MultiExtraConfig)
    return transfer.extra


def _with_facts_of_children(transfer: KVTransferConfig) -> ConnectorDescription:
    children = _settings(transfer).connectors
    found = [KVConnectorFactory.describe(child) for child in children]
    return dataclasses.replace(
        MultiConnector,
        provides_dummy_kv=any(each.provides_dummy_kv for each in found),
        needs_polling=any(each.needs_polling for each in found),
        requires_kv_delivery=any(
            each.requires_kv_delivery and child.is_kv_producer
            for each, child in zip(found, children, strict=True)
        ),
        transfer_mode=next((each.transfer_mode for each in found if each.transfer_mode), ""),
    )


MultiConnector = ConnectorDescription(
    _make_scheduler, _make_worker, configured=_with_facts_of_children
)
