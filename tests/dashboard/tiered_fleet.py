"""Real engines behind a real router; the prefill engines have the storage tiers `cpu` and `disk`.

Each engine has a folder for its disk tier. All share a host pool that is removed at the end.
"""

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.e2e.harness import Cluster, Engine

from kvferry.engine.make_model.writer import make_model

KEY = "sk-admin"


@dataclass(frozen=True)
class TieredFleet:
    prefillers: Sequence[Engine]
    router: Engine

    @property
    def link(self) -> str:
        """The address of the dashboard, with the key."""
        return f"{self.router.url}/dashboard#key={KEY}"


@contextmanager
def start_tiered_fleet(
    directory: Path,
    *prefill_flags: str,
    size: int = 1,
    transports: Sequence[str] = ("shm",),
    probe_interval_s: float = 5.0,
) -> Iterator[TieredFleet]:
    """Start `size` prefill engines and as many decode engines, and end them afterwards."""
    transfer = {"transports": list(transports)}
    make_model(directory / "tiny")
    key, config = directory / "key", directory / "router.toml"
    key.touch(mode=0o600)
    key.write_text(KEY)
    config.write_text(f"[health]\nprobe_interval_s = {probe_interval_s}\n")
    # The pool belongs in memory: its rows are mapped, and the disk of a test machine is slow.
    pool = Path(tempfile.mkdtemp(prefix="kvferry-test-", dir="/dev/shm"))
    try:
        with Cluster(directory, directory / "tiny") as cluster:
            starting = [
                cluster.serve(
                    f"prefill {number}",
                    *prefill_flags,
                    connector="MultiConnector",
                    extra=_with_tiers(transfer, directory / f"disk-{number}", pool / "pool"),
                )
                for number in range(size)
            ]
            starting += [
                cluster.serve(f"decode {number}", extra=transfer) for number in range(size)
            ]
            engines = [engine.ready() for engine in starting]
            flags = ("--admin-key-file", str(key), "--config", str(config))
            router = cluster.proxy(engines[:size], engines[size:], *flags).ready()
            yield TieredFleet(engines[:size], router)
    finally:
        shutil.rmtree(pool)


def _with_tiers(transfer: dict[str, Any], disk: Path, pool: Path) -> dict[str, Any]:
    offloading = {
        "tiers": [{"cpu": "24MiB"}, {"disk": {"path": str(disk), "size": "128MiB"}}],
        "pool_path": str(pool),
        # This model computes faster than it loads; the page must have loads to show.
        "break_even": False,
    }
    return {
        "connectors": [
            {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": extra}
            for name, extra in (("NixlConnector", transfer), ("OffloadingConnector", offloading))
        ]
    }
