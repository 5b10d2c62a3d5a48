"""Tests the detection of RDMA between hosts, beyond plain TCP, which decides which transport is
tried first.
"""

from pathlib import Path

import pytest

from kvferry.transports.locality import has_rdma, nixl_locality, variable_against_remapping


@pytest.fixture
def devices(tmp_path: Path) -> Path:
    (tmp_path / "mlx5_0").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("transports", "expected"),
    [
        (None, True),
        ("all", True),
        ("rc,cuda", True),
        ("^tcp", True),
        ("tcp", False),
        ("^ib", False),
        ("^rc,ud,dc", False),
        ("tcp,gdr_copy", False),
        ("tcp,sm,self", False),
        ("cuda_ipc, cuda_copy,tcp", False),
    ],
)
def test_a_device_counts_unless_ucx_may_not_use_it(
    devices: Path, transports: str | None, expected: bool
) -> None:
    environ = {} if transports is None else {"UCX_TLS": transports}
    assert has_rdma(("UCX",), environ, devices) is expected


def test_a_device_counts_only_if_it_is_one_of_those_that_ucx_may_use(devices: Path) -> None:
    assert has_rdma(("UCX",), {"UCX_NET_DEVICES": "mlx5_0:1,eth0"}, devices)
    assert not has_rdma(("UCX",), {"UCX_NET_DEVICES": "eth0"}, devices)


def test_without_a_device_there_is_no_fabric(tmp_path: Path) -> None:
    assert not has_rdma(("UCX",), {}, tmp_path)
    assert not has_rdma(("UCX",), {}, tmp_path / "none")


def test_a_backend_that_somebody_named_is_believed(tmp_path: Path) -> None:
    assert has_rdma(("UCX", "LIBFABRIC"), {}, tmp_path)


def test_nixl_without_a_fabric_is_near_only_where_it_has_shared_memory() -> None:
    assert nixl_locality(("UCX",), {}) == nixl_locality(("UCX",), {"UCX_TLS": "tcp,sm,self"}) != ""
    assert nixl_locality(("UCX",), {"UCX_TLS": "tcp"}) != nixl_locality(
        ("UCX",), {"UCX_TLS": "tcp"}
    )
    assert nixl_locality(("UCX", "LIBFABRIC"), {}) == ""


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, ""),
        ({"UCX_TLS": "^cuda_ipc"}, ""),
        ({"UCX_TLS": "tcp,cuda_copy"}, ""),
        ({"UCX_TLS": "rc,cuda"}, "UCX_TLS"),
        ({"UCX_TLS": "all"}, "UCX_TLS"),
        ({"UCX_TLS": "^tcp"}, "UCX_TLS"),
        ({"UCX_RCACHE_ENABLE": "no"}, ""),
        ({"UCX_TLS": "^cuda_ipc", "UCX_RCACHE_ENABLE": "try"}, "UCX_RCACHE_ENABLE"),
    ],
)
def test_ucx_may_not_remember_memory_that_a_sleep_frees(
    environ: dict[str, str], expected: str
) -> None:
    assert variable_against_remapping(environ) == expected
