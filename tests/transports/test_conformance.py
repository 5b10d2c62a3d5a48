"""Tests that every data transport keeps the contract of `kvferry.transports.base`."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.transports.mooncake_agents import skip_without_mooncake
from tests.transports.sides import (
    bounce_nixl_side,
    corrupting_side,
    delaying_side,
    dist_side,
    failing_side,
    memory_side,
    mooncake_side,
    nixl_side,
    shm_side,
    shm_side_without_compiler,
    tcp_side,
    write_grant_memory_side,
)

from kvferry.testing.transport_conformance import (
    CASES,
    Case,
    InProcessFarSide,
    SpawnedFarSide,
    TransportPairSource,
    TransportSideMaker,
)
from kvferry.testing.write_grant_conformance import WRITE_GRANT_CASES

SOURCES: dict[str, tuple[TransportSideMaker, type[InProcessFarSide] | type[SpawnedFarSide]]] = {
    "memory": (memory_side, InProcessFarSide),
    "memory-with-write-grants": (write_grant_memory_side, InProcessFarSide),
    "faulty": (delaying_side, InProcessFarSide),
    "shm-one-process": (shm_side, InProcessFarSide),
    "shm": (shm_side, SpawnedFarSide),
    "shm-without-compiler": (shm_side_without_compiler, SpawnedFarSide),
    "tcp-one-process": (tcp_side, InProcessFarSide),
    "tcp": (tcp_side, SpawnedFarSide),
    "dist": (dist_side, SpawnedFarSide),
    "nixl": (nixl_side, SpawnedFarSide),
    "bounce-nixl": (bounce_nixl_side, SpawnedFarSide),
    "mooncake": (mooncake_side, SpawnedFarSide),
}
WITH_WRITE_GRANTS = ("memory-with-write-grants", "tcp-one-process", "tcp", "dist")
ONLY_READ = ("mooncake",)
IMMORTAL = ("shm-one-process",)
"""Sources whose far side runs in our process and cannot be killed alone."""


@pytest.fixture(scope="module", params=list(SOURCES))
def source_name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def source(source_name: str) -> Iterator[TransportPairSource]:
    if source_name == "mooncake":
        skip_without_mooncake()
    made = TransportPairSource(*SOURCES[source_name], only_reads=source_name in ONLY_READ)
    yield made
    made.close()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_transport_keeps_its_contract(
    source_name: str, source: TransportPairSource, case: Case
) -> None:
    if case.needs_peer_death and source_name in IMMORTAL:
        pytest.skip("the far side is this process")
    case.run(source)


@pytest.fixture(scope="module", params=WITH_WRITE_GRANTS)
def granting_source(request: pytest.FixtureRequest) -> Iterator[TransportPairSource]:
    made = TransportPairSource(*SOURCES[request.param])
    yield made
    made.close()


@pytest.mark.parametrize("case", WRITE_GRANT_CASES, ids=lambda case: case.name)
def test_the_transport_admits_only_what_was_granted(
    granting_source: TransportPairSource, case: Case
) -> None:
    case.run(granting_source)


@pytest.mark.parametrize(
    "transport", [pytest.param("nixl", marks=pytest.mark.exhaustive), "bounce-nixl"]
)
def test_nixl_keeps_its_contract_over_an_emulated_transport(transport: str) -> None:
    # UCX reads its settings once per process, so the whole suite runs in another process.
    root = Path(__file__).parents[2]
    ran = subprocess.run(
        [sys.executable, "-m", "tests.transports.run_conformance", transport],
        cwd=root,
        env=os.environ | {"UCX_TLS": "tcp"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert f"{len(CASES)} cases" in ran.stdout


@pytest.mark.parametrize("make", [corrupting_side, failing_side])
def test_the_suite_can_fail(make: TransportSideMaker) -> None:
    source = TransportPairSource(make, InProcessFarSide)
    case = next(
        case for case in CASES if case.name == "scattered_reads_bring_exactly_the_named_bytes"
    )
    with pytest.raises(AssertionError):
        case.run(source)
    source.close()
