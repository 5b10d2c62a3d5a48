"""Runs the conformance suite in a process of its own.

Usage: `python -m tests.transports.run_conformance nixl`.
"""

import os
import sys
import traceback

from tests.transports.sides import bounce_nixl_side, nixl_side, shm_side

from kvferry.testing.transport_conformance import CASES, SpawnedFarSide, TransportPairSource

MAKERS = {"nixl": nixl_side, "shm": shm_side, "bounce-nixl": bounce_nixl_side}


def main(transport: str) -> int:
    source = TransportPairSource(MAKERS[transport], SpawnedFarSide)
    failed = 0
    for case in CASES:
        try:
            case.run(source)
        except Exception:  # one failing case must not stop the other cases
            failed += 1
            print(f"FAILED {case.name}\n{traceback.format_exc()}")
    source.close()
    print(
        f"{transport} over {os.environ.get('UCX_TLS', 'default transports')}: {len(CASES)} cases, "
        f"{failed} failed"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
