"""Engines and routers that are restarted one after another under streams: no stream fails, and all
tokens are those of a single engine.
"""

import asyncio
from collections.abc import Iterator

import pytest
from tests.deploy.rolling_restart import Fleet, roll, wrong
from tests.e2e.harness import Cluster, Engine

from kvferry.engine.make_model.writer import make_model

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("rolling")
    make_model(folder / "tiny")
    with Cluster(folder, folder / "tiny") as made:
        yield made


@pytest.fixture(scope="module")
def plain(cluster: Cluster) -> Engine:
    """A single engine without a connector: its answers are the right ones."""
    return cluster.serve("plain", is_plain=True).ready()


@pytest.mark.parametrize(
    ("num_prefill", "num_decode", "num_streams"),
    [
        pytest.param(1, 2, 8, id="1P2D"),
        pytest.param(3, 3, 50, marks=pytest.mark.exhaustive, id="3P3D"),
    ],
)
def test_a_rolling_restart_fails_no_stream(
    cluster: Cluster, plain: Engine, num_prefill: int, num_decode: int, num_streams: int
) -> None:
    fleet = Fleet(cluster, num_prefill, num_decode)
    found = asyncio.run(roll(fleet, num_streams))
    assert found.failures == []
    assert found.num_restarted == num_prefill + num_decode + len(fleet.routers)
    *of_engines, first, last = found.num_waited_for
    assert min(of_engines) > 0, "an engine was idle when it had to end"
    assert first + last > 0, "both routers were idle when they had to end"
    assert len(found.streams) > num_streams
    assert asyncio.run(wrong(plain, found.streams)) == []
