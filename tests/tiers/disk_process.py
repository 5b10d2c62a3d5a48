"""A process that works on a disk tier's folder beside the tests. It ends when its stdin closes.

python -m tests.tiers.disk_process <root> store-and-remove <key>
python -m tests.tiers.disk_process <root> evict
python -m tests.tiers.disk_process <root> clear
python -m tests.tiers.disk_process <root> store-large <key>
"""

import select
import sys
from pathlib import Path

from kvferry.testing.tier_conformance import NAMESPACE, SECRET, aligned_buffer, payload_of
from kvferry.tiers.base import EntryKey
from kvferry.tiers.disk.space import DiskSpace
from kvferry.tiers.disk.tier import DiskTier
from kvferry.tiers.inventory.disk import DiskInventory

LARGE_BYTES = 512 * 2**20


def main(root: Path, task: str, *key_hex: str) -> None:
    tier = DiskTier(root, NAMESPACE, SECRET, max_bytes=None)
    keys = [EntryKey(bytes.fromhex(text)) for text in key_hex]
    print("ready", flush=True)
    # People clear a folder once: a store does not meet one walk after the other.
    pause_s = 0.001 if task == "clear" else 0
    while not select.select([sys.stdin], [], [], pause_s)[0]:
        if task == "store-and-remove":
            for key in keys:
                tier.store(key, payload_of(key))
            tier.remove(keys)
        elif task == "evict":
            DiskSpace(root, max_bytes=1).sweep()
        elif task == "clear":
            DiskInventory(root).clear(NAMESPACE.hex, lambda _: None)
        elif task == "store-large":
            tier.store(keys[0], aligned_buffer(LARGE_BYTES))
            tier.remove(keys)
    tier.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
