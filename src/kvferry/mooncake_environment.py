"""The environment of the processes that run Mooncake. Pure."""

from collections.abc import Mapping

PASSED = (
    # The system, the libraries and Python.
    "HOME", "LANG", "LC_", "LD_", "MALLOC_", "OMP_", "PATH", "PYTHON", "SSL_CERT_", "TMPDIR", "TZ",
    # Mooncake and its log.
    "GLOG_", "MC_", "MOONCAKE_",
    # The drivers of GPUs and network devices.
    "CUDA_", "HIP_", "HSA_", "IBV_", "MLX", "NVIDIA_", "RDMA", "ROCR_",
)  # fmt: skip
"""The beginnings of the names of variables that Mooncake's processes get."""


def mooncake_environment(environ: Mapping[str, str], defaults: Mapping[str, str]) -> dict[str, str]:
    """The variables of `environ` that Mooncake needs, and `defaults` for those that the operator
    has not set. Strangers can reach Mooncake's ports, so its process gets no variable that may hold
    a secret of the engine: credentials of a cloud or a hub, or the cluster's secret.
    """
    return {**defaults, **{name: environ[name] for name in environ if name.startswith(PASSED)}}
