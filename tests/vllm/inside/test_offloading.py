"""Tests engines with storage tiers: named cases first, then random actions on one or two engines:
adds, aborts, preemptions, small block pools, small host pools, damaged and deleted objects, slow
and failing storage, new weights, restarts. No request may use a wrong slot, the KV events must be
in order, and the engines must hold nothing at the end.

Every seed is a separate test; the name of a failed test contains its seed.
"""

import contextlib
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.sampling import seeds
from tests.tiers.faulty import FaultyTier, GatedCopier, SlowCopier
from tests.vllm.adapters import write_adapter
from tests.vllm.inside.conftest import StartEngine
from tests.vllm.inside.engines import BLOCK, Engine, next_token, run_until
from tests.vllm.inside.test_kv_events import EVENTS, Published
from tests.vllm.inside.test_life_cycle import finish, greedy, prompt, settle, wait_for_load
from vllm.lora.request import LoRARequest
from vllm.v1.core.sched.interface import PauseState

from kvferry.connectors.offloading import settings as offloading_settings
from kvferry.connectors.offloading import worker as worker_half
from kvferry.tiers.pool.segment_files import read_header, segment_paths
from kvferry.transports.registry import ConfiguredTransportKit
from kvferry.types import Region

ACTIONS = 250
WEIGHTS = [0, 1000]
SALTS = {None: 0, "tenant a": 5_000, "tenant b": 7_000}
"""The salts of requests, each with the seed that gives the same tokens another KV."""
KINDS = ["full attention", "MLA", "layers of two sizes"]
WINDOWED_KINDS = ["windows beside full attention", "chunks beside full attention"]


@pytest.fixture
def copiers(monkeypatch: pytest.MonkeyPatch) -> list[GatedCopier]:
    """The copiers of the engines that a test starts, in order."""
    made: list[GatedCopier] = []
    row_copier = ConfiguredTransportKit.row_copier

    def make(kit: ConfiguredTransportKit, regions: Sequence[Region]) -> GatedCopier:
        made.append(GatedCopier(row_copier(kit, regions)))
        return made[-1]

    monkeypatch.setattr(ConfiguredTransportKit, "row_copier", make)
    return made


@pytest.fixture
def start(start_engine: StartEngine, tmp_path: Path) -> Callable[..., Engine]:
    """Starts engines that share a host pool. Without prefix caching, all reuse is by loads."""

    def start(name: str = "a", extra: dict[str, Any] | None = None, **settings: Any) -> Engine:
        tiers = {"num_cpu_blocks": 60, "break_even": False, "pool_path": str(tmp_path / "pool")}
        kv = {
            "kv_connector": "OffloadingConnector",
            "kv_connector_extra_config": tiers | (extra or {}),
        }
        return start_engine(name, **({"enable_prefix_caching": False} | settings), kv=kv)

    return start


StartTiers = Callable[..., Engine]


def run(engine: Engine, name: str, tokens: list[int], **more: Any) -> list[int]:
    engine.add(name, tokens, **more)
    return finish(engine, name)


def steps(engine: Engine, count: int) -> None:
    for _ in range(count):
        engine.step()


# -- loads --


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("kind", [*KINDS, *WINDOWED_KINDS])
@pytest.mark.parametrize("length", [BLOCK, 2 * BLOCK, 3 * BLOCK, 4 * BLOCK, 100])
def test_a_prompt_is_loaded_the_second_time(
    start: StartTiers, kind: str, length: int, is_async: bool
) -> None:
    """The engine computes the last token of a prompt again, so that token's window must be there
    too: of a prompt of 64 tokens, it begins at token 0, but that of the next token begins at 64.
    """
    engine = start(kind=kind, is_async=is_async)
    for number in range(2):
        assert run(engine, f"r{number}", prompt(length)) == greedy(prompt(length), 4)
        settle(engine)
    assert engine.loaded_tokens == loadable(kind, length)


def loadable(kind: str, length: int) -> int:
    if kind == "chunks beside full attention" and length % 64 == 0:
        # vLLM frees the last chunk of local attention before the connector can store it.
        return length - 64
    if kind in WINDOWED_KINDS and length % BLOCK == 0:
        return length - 1
    return length // BLOCK * BLOCK


def test_the_engines_of_one_pool_load_what_the_other_has_stored(start: StartTiers) -> None:
    a, b = start("a"), start("b")
    assert run(a, "r1", prompt(100)) == greedy(prompt(100), 4)
    settle(a)
    assert run(b, "r2", prompt(100)) == greedy(prompt(100), 4)
    assert b.loaded_tokens == 96
    settle(b)


def test_a_request_whose_load_fails_is_computed_in_a_block_pool_that_it_fills(
    start: StartTiers, copiers: list[GatedCopier], tmp_path: Path
) -> None:
    """vLLM counts the blocks of the failed load as reserved, so it would never admit another load
    of the chunks that are left.
    """
    engine = start(num_gpu_blocks_override=12, max_model_len=320)
    tokens = prompt(9 * BLOCK)
    run(engine, "first", tokens)
    settle(engine)
    copiers[0].loads.clear()
    engine.add("again", tokens)
    wait_for_load(engine, "again")
    (path,) = segment_paths(tmp_path / "pool")
    header = read_header(path)
    assert header is not None
    with path.open("r+b") as file:
        # The chunks are stored from the last to the first, in ascending rows.
        file.seek(header[0].layout.rows_at)
        file.write(b"damage")
    copiers[0].loads.set()
    assert finish(engine, "again") == greedy(tokens, 4)
    settle(engine)


# -- blocks that an engine reuses during a copy --


def test_blocks_that_left_a_window_during_a_copy_are_not_stored(
    start: StartTiers, copiers: list[GatedCopier]
) -> None:
    engine = start(
        kind="windows beside full attention", num_gpu_blocks_override=22, max_model_len=320
    )
    copiers[0].saves.clear()
    engine.add("long", prompt(2 * BLOCK + 8), max_tokens=230)
    steps(engine, 90)
    for number in range(3):
        # Takes the blocks that have left the window, among all others.
        engine.add(f"other {number}", prompt(128, start=100 * number), max_tokens=20)
        steps(engine, 22)
    copiers[0].saves.set()
    run_until(lambda: "jobs" not in engine.remains(), engine)
    finish(engine, "long")
    settle(engine)
    for number in range(2):
        tokens = prompt(2 * BLOCK + 8)
        assert run(engine, f"again {number}", tokens) == greedy(tokens, 4)
    settle(engine)


def test_blocks_that_leave_a_window_as_the_request_finishes_are_not_stored(
    start: StartTiers, copiers: list[GatedCopier]
) -> None:
    """When a request finishes, vLLM frees what its window has left, before the connector may ask
    to keep blocks. Here token 79 is the first that does not see block 0.
    """
    engine = start(
        kind="windows beside full attention", num_gpu_blocks_override=22, max_model_len=320
    )
    copiers[0].saves.clear()
    tokens = prompt(2 * BLOCK + 8)
    run(engine, "short", tokens, max_tokens=8)
    engine.add("other", prompt(256, start=200), max_tokens=30)
    steps(engine, 20)
    copiers[0].saves.set()
    finish(engine, "other")
    settle(engine)
    assert run(engine, "again", tokens) == greedy(tokens, 4)
    settle(engine)


def test_blocks_of_a_preempted_request_are_not_stored(
    start: StartTiers, copiers: list[GatedCopier]
) -> None:
    engine = start(num_gpu_blocks_override=12, max_model_len=320)
    copiers[0].saves.clear()
    engine.add("first", prompt(3 * BLOCK), max_tokens=40)
    steps(engine, 3)
    engine.preempt("first")
    engine.abort("first")
    run(engine, "other", prompt(256, start=200))
    copiers[0].saves.set()
    settle(engine)
    assert run(engine, "again", prompt(3 * BLOCK)) == greedy(prompt(3 * BLOCK), 4)
    settle(engine)


def test_a_finished_request_keeps_its_blocks_until_they_are_copied(
    start: StartTiers, copiers: list[GatedCopier]
) -> None:
    """However long the copies take: the stores are not lost."""
    engine = start(num_gpu_blocks_override=14, max_model_len=320)
    copiers[0].saves.clear()
    run(engine, "first", prompt(3 * BLOCK), max_tokens=30)
    steps(engine, 5)
    assert engine.remains()["used blocks"] == 4
    copiers[0].saves.set()
    settle(engine)
    run(engine, "again", prompt(3 * BLOCK))
    assert engine.loaded_tokens == 3 * BLOCK
    settle(engine)


def test_a_request_whose_stores_are_copied_frees_its_blocks_at_once(start: StartTiers) -> None:
    engine = start()
    engine.add("first", prompt(3 * BLOCK), max_tokens=100)
    steps(engine, 5)
    run_until(lambda: "jobs" not in engine.remains(), engine)
    steps(engine, 2)
    engine.abort("first")
    assert "used blocks" not in engine.remains()
    settle(engine)


# -- weights --


def test_kv_of_new_weights_is_not_stored_under_the_keys_of_the_old(
    start: StartTiers, copiers: list[GatedCopier]
) -> None:
    """A request loads when the caches are reset, and is then computed with the new weights."""
    extra = {"offload_prompt_only": False}
    a, b = start("a", extra), start("b", extra)
    run(a, "r1", prompt(2 * BLOCK), max_tokens=1)
    settle(a)
    copiers[0].loads.clear()
    a.add("r2", prompt(6 * BLOCK), max_tokens=4)
    wait_for_load(a, "r2")
    a.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    a.reset()
    copiers[0].loads.set()
    run_until(a.reset, a)
    a.load_weights(1000)
    a.scheduler.set_pause_state(PauseState.UNPAUSED)
    assert finish(a, "r2") == greedy(prompt(6 * BLOCK), 4, seed=1000)
    settle(a)
    assert run(b, "r3", prompt(6 * BLOCK)) == greedy(prompt(6 * BLOCK), 4)
    settle(b)


@pytest.mark.parametrize("is_replaced", [False, True])
def test_kv_of_an_adapter_that_was_replaced_meanwhile_is_not_stored(
    start: StartTiers, tmp_path: Path, is_replaced: bool
) -> None:
    """The adapter's files change after the request has arrived and before vLLM loads them."""
    a, b = start("a"), start("b")
    served, copy = write_adapter(tmp_path / "served"), write_adapter(tmp_path / "copy")
    adapter = LoRARequest("adapter", 1, str(served))
    a.add("r1", prompt(100), lora_request=adapter, seed=2 if is_replaced else 1)
    if is_replaced:
        write_adapter(tmp_path / "served", seed=1)
    finish(a, "r1")
    settle(a)
    again = LoRARequest("adapter", 1, str(copy))
    assert run(b, "r2", prompt(100), lora_request=again, seed=1) == greedy(prompt(100), 4, seed=1)
    settle(b)
    assert b.loaded_tokens == (0 if is_replaced else 96)


# -- whatever happens --


class World:
    """The engines, and what their clients have asked."""

    def __init__(
        self,
        start_engine: StartEngine,
        seed: int,
        folder: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        self.rng = rng = random.Random(seed)
        self.start_engine = start_engine
        self.folder = folder
        self.is_windowed = rng.random() < 0.4
        self.kind = rng.choice(WINDOWED_KINDS if self.is_windowed else KINDS)
        self.extra = self._settings()
        self.engine_settings = {
            # vLLM refuses to start if one request of the greatest length does not fit.
            "num_gpu_blocks_override": rng.choice([14, 18, 30]) + 14 * self.is_windowed,
            "max_model_len": 320,
            "max_num_batched_tokens": rng.choice([64, 128, 2048]),
            "enable_prefix_caching": rng.random() < 0.6,
            "is_async": rng.random() < 0.5,
            "has_drafter": rng.random() < 0.5,
            **({"kv_events_config": EVENTS} if seed % 2 else {}),
        }
        self.is_faulty = rng.random() < 0.5
        self.is_slow = rng.random() < 0.5
        self._spoil(monkeypatch)
        self.serial = 0
        self.restarts = 0
        self.prompts: dict[str, list[int]] = {}
        self.seeds: dict[str, int] = {}
        self.documents = [[rng.randrange(10, 400) for _ in range(224)] for _ in range(3)]
        self.engines = [self._start(name) for name in (["a", "b"] if rng.random() < 0.6 else ["a"])]

    def __str__(self) -> str:
        return (
            f"{self.kind} {self.extra} {self.engine_settings} faulty={self.is_faulty} "
            f"slow={self.is_slow} engines={len(self.engines)}"
        )

    def _settings(self) -> dict[str, Any]:
        rng = self.rng
        disk = {
            "path": str(self.folder / "disk"),
            "size": rng.choice(["256KiB", "64MiB", "64MiB"]),
            "store_after": rng.choice([1, 1, 2]),
        }
        tiers = rng.choice([["cpu"], ["cpu", "disk"], ["disk"]])
        return {
            "tiers": [{"disk": disk}] if "disk" in tiers else [],
            "num_cpu_blocks": rng.choice([8, 20, 60]) if "cpu" in tiers else 0,
            "store_threshold": rng.choice([0, 0, 0, 2]),
            "blocks_per_chunk": 1 if self.is_windowed else rng.choice([1, 1, 1, 2, 4]),
            "offload_prompt_only": rng.random() < 0.5,
            "eviction_policy": rng.choice(["lru", "arc"]),
            "break_even": rng.random() < 0.3,
            "lookup_timeout": rng.choice([0.005, 1.0]),
            "load_timeout": rng.choice([0.02, 5.0]),
            "io_threads": 2,
            "pool_path": str(self.folder / "pool"),
        }

    def _spoil(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Put the tiers behind wrappers that delay and fail, and the copies behind one that
        delays.
        """
        rng = random.Random(self.rng.random())
        if self.is_faulty:
            for module, name in (
                (worker_half, "open_tiers"),
                (offloading_settings, "open_tiers"),
            ):
                opened: Callable[..., Any] = getattr(module, name)

                def open_faulty(
                    *args: Any, opened: Callable[..., Any] = opened
                ) -> dict[str, FaultyTier]:
                    tiers = opened(*args)
                    return {key: FaultyTier(tier, rng) for key, tier in tiers.items()}

                monkeypatch.setattr(module, name, open_faulty)
        if self.is_slow:
            row_copier = ConfiguredTransportKit.row_copier
            monkeypatch.setattr(
                ConfiguredTransportKit,
                "row_copier",
                lambda kit, regions: SlowCopier(row_copier(kit, regions), rng),
            )

    def _start(self, name: str, **more: Any) -> Engine:
        engine = self.start_engine(
            name,
            kind=self.kind,
            kv={"kv_connector": "OffloadingConnector", "kv_connector_extra_config": self.extra},
            **(self.engine_settings | more),
        )
        Published(engine)
        return engine

    # -- actions --

    def actions(self) -> dict[Callable[[], None], float]:
        """Return the possible actions and their weights."""
        return {
            self.step: 16,
            self.add: 5,
            self.abort: 1,
            self.preempt: 0.7,
            self.pause: 3,
            self.reset: 0.15,
            self.reset_running: 0.15,
            self.replace_weights: 0.15,
            self.damage_row: 0.5,
            self.damage_file: 0.5,
            self.delete_file: 0.3,
            self.restart: 0.25,
        }

    def act(self) -> None:
        actions = self.actions()
        (action,) = self.rng.choices(list(actions), list(actions.values()))
        action()

    def step(self) -> None:
        for engine in self.rng.sample(self.engines, len(self.engines)):
            for _ in range(self.rng.randrange(4)):
                engine.step()

    def pause(self) -> None:
        time.sleep(0.002)

    def new_prompt(self) -> list[int]:
        """Return the head of a document, often with a question of its own behind it."""
        document = self.rng.choice(self.documents)
        length = self.rng.choice([1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 128, 150, 224])
        question = [self.rng.randrange(10, 400) for _ in range(self.rng.choice([0, 0, 5, 40]))]
        return document[:length] + question

    def add(self) -> None:
        engine, tokens = self.rng.choice(self.engines), self.new_prompt()
        salt = self.rng.choice([*[None] * 6, "tenant a", "tenant b"])
        max_tokens = self.rng.choice([1, 4, 40])
        self.serial += 1
        choices = self.rng.choice([1, 1, 1, 3])
        for choice in range(choices):
            name = f"{choice}_r{self.serial}" if choices > 1 else f"r{self.serial}"
            self.prompts[name], self.seeds[name] = tokens, SALTS[salt]
            engine.add(
                name,
                tokens,
                max_tokens=min(max_tokens, 310 - len(tokens)),
                seed=SALTS[salt],
                cache_salt=salt,
                skip_reading_prefix_cache=True if self.rng.random() < 0.1 else None,
                abort_immediately=self.rng.random() < 0.03,
            )

    def abort(self) -> None:
        engine = self.rng.choice(self.engines)
        if engine.scheduler.requests:
            engine.abort(self.rng.choice(list(engine.scheduler.requests)))

    def preempt(self) -> None:
        engine = self.rng.choice(self.engines)
        if engine.scheduler.running:
            engine.preempt(self.rng.choice(engine.scheduler.running).request_id)

    def reset(self) -> None:
        """Reset the caches although the weights stay, at any time."""
        self.rng.choice(self.engines).reset()

    def reset_running(self) -> None:
        """Preempt all running requests and reset the caches, at any time. vLLM raises an error if
        other requests hold blocks.
        """
        engine = self.rng.choice(self.engines)
        with contextlib.suppress(RuntimeError):
            engine.scheduler.reset_prefix_cache(
                reset_running_requests=True, reset_connector=self.rng.random() < 0.5
            )
        if self.rng.random() < 0.5:
            self.abort()

    def replace_weights(self) -> None:
        """Replace the weights of one engine as a trainer does: pause, reset, load, resume."""
        engine = self.rng.choice(self.engines)
        engine.scheduler.set_pause_state(PauseState.PAUSED_NEW)
        run_until(engine.reset, *self.engines)
        engine.load_weights(self.rng.choice(WEIGHTS))
        engine.scheduler.set_pause_state(PauseState.UNPAUSED)

    def damage_row(self) -> None:
        paths = segment_paths(self.folder / "pool") if (self.folder / "pool").is_dir() else []
        if paths:
            path = self.rng.choice(paths)
            header = read_header(path)
            assert header is not None
            layout = header[0].layout
            self._damage(path, layout.rows_at, layout.num_rows * layout.row_stride)

    def damage_file(self) -> None:
        if files := self._objects():
            path = self.rng.choice(files)
            self._damage(path, 0, path.stat().st_size)

    def _damage(self, path: Path, first: int, size: int) -> None:
        with path.open("r+b") as file:
            for _ in range(3):
                file.seek(first + self.rng.randrange(size))
                byte = file.read(1)
                file.seek(-1, 1)
                file.write(bytes([byte[0] ^ 0x55]))

    def delete_file(self) -> None:
        if files := self._objects():
            for path in self.rng.sample(files, self.rng.randrange(1, len(files) + 1)):
                path.unlink(missing_ok=True)

    def _objects(self) -> Sequence[Path]:
        files = (path for path in (self.folder / "disk").rglob("*") if path.is_file())
        return sorted(path for path in files if path.stat().st_size > 4096)

    def restart(self) -> None:
        """Stop an engine, which loses its requests, and start it on the same pool and folder."""
        index = self.rng.randrange(len(self.engines))
        engine = self.engines[index]
        assert engine.wrong_slots == []
        for name in engine.scheduler.requests:
            engine.answers[name].finish = "abort"
        self.check_answers(engine)
        engine.close()
        self.restarts += 1
        self.engines[index] = self._start(engine.name, seed=self.restarts)
        self.engines[index].loaded_tokens = engine.loaded_tokens

    # -- end --

    def end(self) -> None:
        run_until(lambda: not any(engine.remains() for engine in self.engines), *self.engines)
        for engine in self.engines:
            self.check_answers(engine)

    def check_answers(self, engine: Engine) -> None:
        """Check that every request ended with right tokens or the client's own abort. A preempted
        request may continue with other weights, so `wrong_slots` is the strict check.
        """
        assert engine.wrong_slots == []
        for name, answer in engine.answers.items():
            said = list(self.prompts[name])
            for token in answer.tokens:
                possible = [next_token(said, self.seeds[name] + weights) for weights in WEIGHTS]
                assert token in possible, name
                said.append(token)
            assert answer.finish in ("length", "abort"), name


@pytest.mark.parametrize("seed", seeds(8, exhaustively=64))
def test_whatever_happens_nothing_is_left(
    start_engine: StartEngine, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(start_engine, seed, tmp_path, monkeypatch)
    print(world)
    for _ in range(ACTIONS):
        world.act()
    world.end()
    print(f"restarts={world.restarts} loaded={[e.loaded_tokens for e in world.engines]}")
