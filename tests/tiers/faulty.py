"""Storage tiers and copies that are slow or fail, around the real ones."""

import random
import threading
import time
from collections.abc import Sequence

from kvferry.tiers.base import (
    EntryKey,
    LoadOutcome,
    LoadResult,
    StoreOutcome,
    StoreResult,
    Tier,
    TierUsage,
)
from kvferry.transports.base import RowBlocks, RowCopier

GATE_TIMEOUT_S = 60.0


class FaultyTier:
    """A tier whose storage sometimes answers late, fails, or breaks the contract by raising."""

    def __init__(self, tier: Tier, rng: random.Random) -> None:
        self._tier = tier
        self._rng = rng

    @property
    def name(self) -> str:
        return self._tier.name

    def find(self, keys: Sequence[EntryKey]) -> list[bool]:
        self._delay()
        if self._rng.random() < 0.1:
            return [self._rng.random() < 0.5 for _ in keys]
        return self._tier.find(keys)

    def find_prefix(self, keys: Sequence[EntryKey]) -> int:
        self._delay()
        if self._rng.random() < 0.1:
            return self._rng.randrange(len(keys) + 1)
        return self._tier.find_prefix(keys)

    def load(self, key: EntryKey, into: memoryview) -> LoadResult:
        self._delay()
        if self._rng.random() < 0.1:
            # After a failure the contents of the row are undefined.
            into[:] = self._rng.randbytes(len(into))
            return LoadResult(LoadOutcome.FAILED, "the storage failed")
        return self._tier.load(key, into)

    def store(self, key: EntryKey, payload: memoryview) -> StoreResult:
        self._delay()
        if self._rng.random() < 0.1:
            return StoreResult(StoreOutcome.FAILED, "the storage failed")
        return self._tier.store(key, payload)

    def remove(self, keys: Sequence[EntryKey]) -> None:
        self._tier.remove(keys)

    def usage(self) -> TierUsage:
        return self._tier.usage()

    def close(self) -> None:
        self._tier.close()

    def _delay(self) -> None:
        if self._rng.random() < 0.3:
            time.sleep(self._rng.choice([0.001, 0.01, 0.05]))
        if self._rng.random() < 0.02:
            raise OSError("a bug of the tier")


class GatedCopier:
    """Copies that begin when a test opens their gate. Both gates are open at first."""

    def __init__(self, copier: RowCopier) -> None:
        self._copier = copier
        self.saves = threading.Event()
        self.loads = threading.Event()
        self.saves.set()
        self.loads.set()
        self.num_saves_begun = 0

    def row_bytes(self, group: int, num_blocks: int) -> int:
        return self._copier.row_bytes(group, num_blocks)

    def pin(self, address: int, size_bytes: int) -> None:
        self._copier.pin(address, size_bytes)

    def unpin(self, address: int) -> None:
        self._copier.unpin(address)

    def save(self, rows: Sequence[RowBlocks]) -> list[int]:
        self.num_saves_begun += 1
        assert self.saves.wait(GATE_TIMEOUT_S)
        return self._copier.save(rows)

    def load(self, rows: Sequence[RowBlocks]) -> list[int]:
        assert self.loads.wait(GATE_TIMEOUT_S)
        return self._copier.load(rows)

    def copy_row(self, row: RowBlocks, target: int) -> int:
        return self._copier.copy_row(row, target)

    def close(self) -> None:
        self._copier.close()


class SlowCopier(GatedCopier):
    """Copies that take longer than several steps of the engine, before and after each row."""

    def __init__(self, copier: RowCopier, rng: random.Random) -> None:
        super().__init__(copier)
        self._rng = rng

    def save(self, rows: Sequence[RowBlocks]) -> list[int]:
        checksums: list[int] = []
        for row in rows:
            self._delay()
            checksums += super().save([row])
        self._delay()
        return checksums

    def load(self, rows: Sequence[RowBlocks]) -> list[int]:
        checksums: list[int] = []
        for row in rows:
            self._delay()
            checksums += super().load([row])
        self._delay()
        return checksums

    def _delay(self) -> None:
        if self._rng.random() < 0.3:
            time.sleep(self._rng.choice([0.0005, 0.003, 0.02]))
