"""Property tests assert no time: on a busy machine a slow example says nothing about the code.

Where several processes test, each takes a file at a time, the long ones first, so that all end at about the same time. Tests with real vLLM
are as one file: its servers take memory, and share one that is expensive to start.
"""

import pytest
from hypothesis import settings

settings.register_profile("kvferry", deadline=None)
settings.load_profile("kvferry")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        is_vllm = item.get_closest_marker("vllm") is not None
        item.add_marker(pytest.mark.xdist_group("vllm" if is_vllm else str(item.path.relative_to(item.config.rootpath))))
    items.sort(key=_turn)


def _turn(item: pytest.Item) -> int:
    return 0 if item.get_closest_marker("vllm") else 1 if item.get_closest_marker("slow") else 2
