"""Tests of kvferry's tiers in vLLM's own OffloadingConnector, in real vLLM engines: stored KV is used
only if it is what the engine itself would compute. The controls show that the same situations give
wrong text with vLLM's own `fs` tier.
"""

import random
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.vllm.fleet import PYTHON, ROOT
from tests.vllm.stock_engines import StockEngine, StockEngines

from kvferry.engine.make_model.writer import make_model
from kvferry.tiers.base import ObjectKey
from kvferry.tiers.envelope import HEADER_BYTES, Envelope

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]

BLOCK = 32
PROMPT_TOKENS = 300
NUM_CHUNKS = PROMPT_TOKENS // BLOCK
STORED_TOKENS = NUM_CHUNKS * BLOCK
FLIPS_EVERY = 64

Prompt = list[int]


def random_prompts(count: int, seed: int) -> list[Prompt]:
    rng = random.Random(seed)
    return [[rng.randrange(3, 500) for _ in range(PROMPT_TOKENS)] for _ in range(count)]


PROMPTS = random_prompts(4, seed=54)
FILLERS = random_prompts(3, seed=55)
"""Together they take more chunks than vLLM's CPU tier has."""


@dataclass(frozen=True)
class Checkpoints:
    first: Path
    second: Path
    """Other weights of the same model."""


@dataclass(frozen=True)
class RightTokens:
    """What vLLM answers to `PROMPTS` without a connector."""

    first: list[list[int]]
    second: list[list[int]]


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StockEngines]:
    if not PYTHON.exists():
        pytest.skip("vLLM is not installed here; make setup-vllm does it")
    with StockEngines(tmp_path_factory.mktemp("stock")) as engines:
        yield engines


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    directory = tmp_path_factory.mktemp("models")
    checkpoints = Checkpoints(directory / "first", directory / "second")
    make_model(checkpoints.first, seed=0)
    make_model(checkpoints.second, seed=1)
    return checkpoints


@pytest.fixture(scope="module")
def right(engines: StockEngines, checkpoints: Checkpoints) -> RightTokens:
    engine = engines.start(checkpoints.first, None)
    assert engine.call("import_path") == str(ROOT / "src/kvferry")
    first = tokens(engine, PROMPTS)
    engine.call("load_weights", str(checkpoints.second))
    assert engine.call("reset", False)
    second = tokens(engine, PROMPTS)
    engine.close()
    assert all(old != new for old, new in zip(first, second, strict=True))
    return RightTokens(first, second)


def tokens(engine: StockEngine, prompts: Sequence[Prompt]) -> list[list[int]]:
    return [list(answer["tokens"]) for answer in engine.ask(*prompts)]


def disk_tier(folder: Path, **settings: Any) -> dict[str, Any]:
    return {
        "type": "KVFerryDiskTier",
        "module_path": "kvferry.vllm.stock_tiers",
        "path": str(folder),
        "size": 1 << 30,
        **settings,
    }


def fs_tier(folder: Path) -> dict[str, Any]:
    return {"type": "fs", "root_dir": str(folder)}


def objects(folder: Path) -> set[Path]:
    """The stored objects; vLLM's `fs` tier calls them *.bin."""
    found = (path for path in folder.rglob("*") if path.is_file())
    return {path for path in found if path.suffix == ".bin" or len(path.name) == 64}


def forget_prompts(engine: StockEngine) -> None:
    """Leave the prompts' KV in the secondary tier only."""
    engine.ask(*FILLERS)
    assert engine.call("reset", False)


def store(engine: StockEngine, folder: Path, prompt: Prompt) -> list[Path]:
    """Let the engine compute a prompt, and return the objects that it has stored."""
    before = objects(folder)
    assert engine.ask(prompt)[0]["cached"] == 0
    new = sorted(objects(folder) - before)
    assert len(new) == NUM_CHUNKS
    forget_prompts(engine)
    return new


def flip(path: Path, every: int | None = None) -> None:
    """Flip one bit in the middle of a file, or one in so many bytes."""
    data = bytearray(path.read_bytes())
    for place in range(0, len(data), every) if every else [len(data) // 2]:
        data[place] ^= 1 << (place // (every or 1) % 8)
    path.write_bytes(data)


# -- objects that are not what they claim to be --


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("disk") / "tier"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A path at which the checkpoint is replaced by another one."""
    path = tmp_path_factory.mktemp("served") / "model"
    make_model(path, seed=0)
    return path


@pytest.fixture(scope="module")
def engine(engines: StockEngines, served: Path, folder: Path) -> StockEngine:
    return engines.start(served, disk_tier(folder))


def seal_again(paths: Sequence[Path], secret: bytes, namespace: bytes | None) -> None:
    """Replace objects by objects of other contents, with a MAC under `secret`."""
    for path in paths:
        data = bytearray(path.read_bytes())
        data[HEADER_BYTES + 100 : HEADER_BYTES + 200] = bytes(100)
        space = namespace or bytes.fromhex(path.parent.parent.name)
        payload = memoryview(data)[HEADER_BYTES:]
        header = Envelope(secret, space).seal(ObjectKey(bytes.fromhex(path.name)), payload)
        path.write_bytes(header + payload)


def flip_each(paths: Sequence[Path]) -> None:
    for path in paths:
        flip(path)


def truncate_each(paths: Sequence[Path]) -> None:
    for number, path in enumerate(paths):
        data = path.read_bytes()
        path.write_bytes(data[: len(data) * number // len(paths)])


def forge_each(paths: Sequence[Path]) -> None:
    seal_again(paths, b"not the secret of these engines", None)


def move_each_to_another_namespace(paths: Sequence[Path]) -> None:
    from tests.vllm.stock_engines import SECRET

    seal_again(paths, SECRET.encode(), bytes(16))


def exchange(paths: Sequence[Path]) -> None:
    """Give each object the name of the next one."""
    contents = [path.read_bytes() for path in paths]
    for path, data in zip(paths, [*contents[1:], contents[0]], strict=True):
        path.write_bytes(data)


@pytest.mark.parametrize(
    "damage", [flip_each, truncate_each, forge_each, move_each_to_another_namespace, exchange]
)
def test_a_damaged_object_is_refused_and_computed(
    engine: StockEngine, folder: Path, right: RightTokens, damage: Any
) -> None:
    paths = store(engine, folder, PROMPTS[0])
    # The control: undamaged objects are used.
    (answer,) = engine.ask(PROMPTS[0])
    assert answer == {"tokens": right.first[0], "cached": STORED_TOKENS}
    forget_prompts(engine)
    num_refused = engine.metrics().get("loads_total refused", 0)
    damage(paths)
    (answer,) = engine.ask(PROMPTS[0])
    assert answer == {"tokens": right.first[0], "cached": 0}
    assert engine.metrics()["loads_total refused"] == num_refused + NUM_CHUNKS
    # The engine has stored what it computed; the next test starts without it.
    assert set(paths) <= objects(folder), engine.metrics()
    forget_prompts(engine)
    for path in paths:
        path.unlink()


def test_an_engine_whose_folder_is_removed_or_full_goes_on(
    engine: StockEngine, folder: Path, right: RightTokens
) -> None:
    store(engine, folder, PROMPTS[1])
    shutil.rmtree(folder)
    (answer,) = engine.ask(PROMPTS[1])
    assert answer == {"tokens": right.first[1], "cached": 0}
    engine.call("limit_files", 8192)
    forget_prompts(engine)
    assert tokens(engine, PROMPTS[2:3]) == right.first[2:3]
    assert engine.metrics()["stores_total failed"] > 0
    engine.call("limit_files", -1)


# -- weights --


def test_objects_of_other_weights_at_the_same_path_are_not_found(
    engines: StockEngines,
    engine: StockEngine,
    served: Path,
    tmp_path: Path,
    right: RightTokens,
) -> None:
    folder = tmp_path / "tier"
    first = engines.start(served, disk_tier(folder))
    assert tokens(first, PROMPTS) == right.first
    first.close()
    make_model(served, seed=1)
    second = engines.start(served, disk_tier(folder))
    make_model(served, seed=0)
    assert [answer["cached"] for answer in second.ask(*PROMPTS)] == [0] * len(PROMPTS)
    forget_prompts(second)
    assert second.ask(PROMPTS[0]) == [{"tokens": right.second[0], "cached": STORED_TOKENS}]
    second.close()
    assert len([path for path in folder.iterdir() if path.is_dir()]) == 2
