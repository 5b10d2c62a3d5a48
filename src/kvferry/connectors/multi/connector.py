"""`MultiConnector`: builds the sides of its children, and the two sides that combine them
(`scheduler.py`, `worker.py`).
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from kvferry.config import KVTransferConfig, MultiExtraConfig
from kvferry.connectors.contract import ConnectorConfig, ConnectorDescription, KVCacheConfig
from kvferry.connectors.factory import KVConnectorFactory, check_cache
from kvferry.connectors.multi.children import Children, check_children, name_children
from kvferry.connectors.multi.lookup import ChildTraits
from kvferry.connectors.multi.scheduler import MultiScheduler
from kvferry.connectors.multi.worker import MultiWorker
from kvferry.errors import ConfigError


@dataclasses.dataclass(frozen=True, slots=True)
class Child:
    """A child that is about to be built."""

    name: str
    description: ConnectorDescription
    config: ConnectorConfig
    traits: ChildTraits


def list_children(config: ConnectorConfig) -> list[Child]:
    """The children that a configuration lists, if they can work together."""
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
    return [
        Child(name, description, child, traits_of(index, description))
        for index, (name, description, child) in enumerate(zip(names, found, configs, strict=True))
    ]


def traits_of(index: int, description: ConnectorDescription) -> ChildTraits:
    """How a child may be combined with others."""
    return ChildTraits(
        index,
        description.honours_token_range,
        description.loads_are_optional,
        description.provides_dummy_kv,
        needs_polling=description.needs_polling,
    )


@contextmanager
def shut_down_after_failure(sides: list[Any]) -> Iterator[None]:
    """If a child cannot be built, the children before it must not leave threads behind."""
    with ExitStack() as undo:
        undo.callback(lambda: [side.shutdown() for side in sides])
        yield
        undo.pop_all()


def _build(
    config: ConnectorConfig,
    cache: KVCacheConfig,
    make_side: Callable[[ConnectorDescription, ConnectorConfig, KVCacheConfig], Any],
) -> Children:
    children, sides = list_children(config), list[Any]()
    with shut_down_after_failure(sides):
        for child in children:
            check_cache(child.config.kv_transfer.kv_connector, child.description, cache)
            sides.append(make_side(child.description, child.config, cache))
    names = [child.name for child in children]
    check_finished_counts(names, sides, config.parallel.tp_size)
    return Children(sides, names, [child.traits for child in children])


def check_finished_counts(names: Sequence[str], sides: Sequence[Any], world_size: int) -> None:
    """Raise `ConfigError` if a child reports its transfers on some ranks only: a rank cannot know
    which of its children will report.
    """
    for name, side in zip(names, sides, strict=True):
        count = getattr(side, "get_finished_count", lambda: None)()
        if count not in (None, world_size) and len(names) > 1:
            raise ConfigError(
                f"{name} reports its transfers on {count} of {world_size} ranks only, so it cannot "
                "be combined with other connectors"
            )


def _make_scheduler(config: ConnectorConfig, cache: KVCacheConfig) -> MultiScheduler:
    children = _build(config, cache, lambda child, *args: child.make_scheduler(*args))
    timeout_s = _settings(config.kv_transfer).lookup_timeout
    return MultiScheduler(children, cache.block_size, timeout_s)


def _make_worker(config: ConnectorConfig, cache: KVCacheConfig) -> MultiWorker:
    return MultiWorker(
        _build(config, cache, lambda child, *args: child.make_worker(*args)), len(cache.groups)
    )


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
