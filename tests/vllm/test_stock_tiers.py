"""Tests of kvferry's tiers in vLLM's own OffloadingConnector, in real vLLM engines: stored KV is
used only if it is what the engine itself would compute. The controls show that the same situations
give wrong text with vLLM's own `fs` tier.
"""

import random
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.checkpoints import put_checkpoint
from tests.tiers.s3_server import request, s3_server
from tests.vllm.adapters import write_adapter
from tests.vllm.documented import documented
from tests.vllm.fleet import PYTHON, ROOT
from tests.vllm.stock_engines import SECRET, StockEngine, StockEngines

from kvferry.tiers.base import ObjectKey
from kvferry.tiers.envelope import HEADER_BYTES, Envelope
from kvferry.types import Address

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]

BLOCK = 32
PROMPT_TOKENS = 300
NUM_CHUNKS = PROMPT_TOKENS // BLOCK
STORED_TOKENS = NUM_CHUNKS * BLOCK

Prompt = list[int]
Damage = Callable[[Sequence[Path]], None]


def random_prompts(count: int, seed: int) -> list[Prompt]:
    rng = random.Random(seed)
    return [[rng.randrange(3, 500) for _ in range(PROMPT_TOKENS)] for _ in range(count)]


PROMPTS = random_prompts(9, seed=54)
FILLERS = random_prompts(5, seed=55)
"""Together they take nearly twice as many chunks as vLLM's CPU tier has rows: some chunks of a
filler may be there already, and evict nothing.
"""


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
    put_checkpoint(checkpoints.first, 0)
    put_checkpoint(checkpoints.second, 1)
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


def documented_tier(number: int, **settings: Any) -> dict[str, Any]:
    """The tier of one of the commands in docs/vllm.md, with settings for tests."""
    command = documented("kvferry's tiers in vLLM's own OffloadingConnector")[number]
    (entry,) = command.transfer["kv_connector_extra_config"]["secondary_tiers"]
    assert settings.keys() <= entry.keys()
    # On a busy machine, no load may be given up.
    return {**entry, **settings, "load_timeout": 100, "store_timeout": 100}


def disk_tier(folder: Path) -> dict[str, Any]:
    return documented_tier(0, path=str(folder))


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


def flip(path: Path, places: range) -> None:
    """Flip one bit in each of these bytes of a file."""
    data = bytearray(path.read_bytes())
    for place in places:
        data[place] ^= 0x40
    path.write_bytes(data)


# -- objects that are not what they claim to be --


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("disk") / "tier"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A path at which the checkpoint is replaced by another one."""
    path = tmp_path_factory.mktemp("served") / "model"
    put_checkpoint(path, 0)
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
        middle = path.stat().st_size // 2
        flip(path, range(middle, middle + 1))


def truncate_each(paths: Sequence[Path]) -> None:
    for number, path in enumerate(paths):
        data = path.read_bytes()
        path.write_bytes(data[: len(data) * number // len(paths)])


def forge_each(paths: Sequence[Path]) -> None:
    seal_again(paths, b"not the secret of these engines", None)


def move_each_to_another_namespace(paths: Sequence[Path]) -> None:
    seal_again(paths, SECRET.encode(), bytes(16))


def exchange(paths: Sequence[Path]) -> None:
    """Give each object the name of the next one."""
    contents = [path.read_bytes() for path in paths]
    for path, data in zip(paths, [*contents[1:], contents[0]], strict=True):
        path.write_bytes(data)


DAMAGES: list[Damage] = [
    flip_each,
    truncate_each,
    forge_each,
    move_each_to_another_namespace,
    exchange,
]


@pytest.mark.parametrize(("number", "damage"), list(enumerate(DAMAGES, start=4)))
def test_a_damaged_object_is_refused_and_computed(
    engine: StockEngine, folder: Path, right: RightTokens, number: int, damage: Damage
) -> None:
    prompt, right_tokens = PROMPTS[number], right.first[number]
    paths = store(engine, folder, prompt)
    num_refused = engine.metrics().get("loads_total refused", 0)
    # The control: undamaged objects are used.
    assert engine.ask(prompt) == [{"tokens": right_tokens, "cached": STORED_TOKENS}]
    forget_prompts(engine)
    damage(paths)
    assert engine.ask(prompt) == [{"tokens": right_tokens, "cached": 0}]
    assert engine.metrics()["loads_total refused"] == num_refused + NUM_CHUNKS
    # The engine has stored again what it computed.
    assert objects(folder).issuperset(paths), (engine.metrics(), engine.process.tail(20))


def test_an_engine_whose_disk_is_full_or_gone_goes_on(
    engines: StockEngines, checkpoints: Checkpoints, tmp_path: Path, right: RightTokens
) -> None:
    folder = tmp_path / "tier"
    engine = engines.start(checkpoints.first, disk_tier(folder))
    store(engine, folder, PROMPTS[1])
    stored = objects(folder)
    engine.call("limit_files", 8192)
    assert engine.ask(PROMPTS[2]) == [{"tokens": right.first[2], "cached": 0}]
    assert objects(folder) == stored
    assert engine.metrics()["stores_total failed"] > 0
    shutil.rmtree(folder)
    assert engine.ask(PROMPTS[1]) == [{"tokens": right.first[1], "cached": 0}]
    engine.close()


# -- weights --


def test_objects_of_other_weights_at_the_same_path_are_not_found(
    engines: StockEngines, engine: StockEngine, served: Path, folder: Path, right: RightTokens
) -> None:
    first = PROMPTS[:4]
    engine.ask(*first)
    assert len(objects(folder)) >= NUM_CHUNKS * len(first)
    put_checkpoint(served, 1)
    second = engines.start(served, disk_tier(folder))
    put_checkpoint(served, 0)
    answers = second.ask(*first)
    assert [answer["tokens"] for answer in answers] == right.second[:4]
    assert [answer["cached"] for answer in answers] == [0] * len(first)
    # Both engines go on, each with its own objects in the one folder.
    for each, tokens_of_each in ((second, right.second), (engine, right.first)):
        forget_prompts(each)
        assert each.ask(PROMPTS[3]) == [{"tokens": tokens_of_each[3], "cached": STORED_TOKENS}]
    second.close()


def test_weights_are_replaced_in_a_running_engine(
    engines: StockEngines, checkpoints: Checkpoints, tmp_path: Path, right: RightTokens
) -> None:
    folder = tmp_path / "tier"
    engine = engines.start(checkpoints.first, disk_tier(folder))
    assert tokens(engine, PROMPTS[:2]) == right.first[:2]
    engine.call("load_weights", str(checkpoints.second))
    # Not reset yet: whatever vLLM answers now, no KV of unknown weights is stored.
    stored = objects(folder)
    engine.ask(PROMPTS[2])
    assert objects(folder) == stored
    assert engine.metrics()["is_suspended"] == 1
    assert engine.call("reset", True)
    assert engine.ask(PROMPTS[0]) == [{"tokens": right.second[0], "cached": 0}]
    assert engine.metrics()["is_suspended"] == 0
    forget_prompts(engine)
    assert engine.ask(PROMPTS[0]) == [{"tokens": right.second[0], "cached": STORED_TOKENS}]
    # An engine that starts with the first weights finds only their objects.
    other = engines.start(checkpoints.first, disk_tier(folder))
    assert other.ask(PROMPTS[0]) == [{"tokens": right.first[0], "cached": STORED_TOKENS}]
    # Reset first, replace afterwards, as vLLM's `pause` does.
    assert engine.call("reset", True)
    engine.call("load_weights", str(checkpoints.first))
    assert engine.ask(PROMPTS[1]) == [{"tokens": right.first[1], "cached": 0}]
    assert engine.metrics()["is_suspended"] == 0
    # vLLM cannot reset its prefix cache while a request has blocks.
    engine.call("hold", PROMPTS[3])
    engine.call("load_weights", str(checkpoints.second))
    assert not engine.call("reset", True)
    stored = objects(folder)
    engine.ask(PROMPTS[2])
    assert objects(folder) == stored
    assert engine.call("reset", True)
    assert engine.ask(PROMPTS[0]) == [{"tokens": right.second[0], "cached": 0}]
    assert objects(folder) > stored
    engine.close()
    other.close()


def test_an_adapter_is_known_by_its_contents(
    engines: StockEngines, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    folder, adapter = tmp_path / "tier", write_adapter(tmp_path / "adapter", seed=0)
    # vLLM's default algorithm may hash equal names of adapters differently.
    options = {"enable_lora": True, "max_lora_rank": 8, "prefix_caching_hash_algo": "sha256_cbor"}
    engine = engines.start(checkpoints.first, disk_tier(folder), **options)
    (first,) = engine.ask(PROMPTS[0], adapter=adapter)
    forget_prompts(engine)
    assert engine.ask(PROMPTS[0], adapter=adapter) == [{**first, "cached": STORED_TOKENS}]
    engine.close()
    write_adapter(adapter, seed=1)
    engine = engines.start(checkpoints.first, disk_tier(folder), **options)
    (second,) = engine.ask(PROMPTS[0], adapter=adapter)
    assert second["cached"] == 0
    assert second["tokens"] != first["tokens"]
    # Files that change under an engine: the engine cannot tell what it serves.
    forget_prompts(engine)
    write_adapter(adapter, seed=0)
    stored = objects(folder)
    assert engine.ask(PROMPTS[0], adapter=adapter) == [second]
    assert objects(folder) == stored
    engine.close()


# -- controls --


def test_vllms_own_tier_gives_wrong_text(
    engines: StockEngines, tmp_path: Path, checkpoints: Checkpoints, right: RightTokens
) -> None:
    folder, served = tmp_path / "fs", tmp_path / "model"
    put_checkpoint(served, 0)
    engine = engines.start(served, fs_tier(folder))
    for path in store(engine, folder, PROMPTS[0]):
        # The exponent of one number in 16.
        flip(path, range(3, path.stat().st_size, 64))
    (damaged,) = engine.ask(PROMPTS[0])
    assert damaged["cached"] == STORED_TOKENS
    assert damaged["tokens"] != right.first[0]
    assert tokens(engine, PROMPTS[1:2]) == right.first[1:2]
    engine.call("load_weights", str(checkpoints.second))
    assert engine.call("reset", True)
    (stale,) = engine.ask(PROMPTS[1])
    assert stale["cached"] == STORED_TOKENS
    assert stale["tokens"] != right.second[1]
    engine.close()
    put_checkpoint(served, 1)
    restarted = engines.start(served, fs_tier(folder))
    (stale,) = restarted.ask(PROMPTS[1])
    assert stale["cached"] == STORED_TOKENS
    assert stale["tokens"] != right.second[1]
    restarted.close()


# -- an object store --


def test_objects_in_a_bucket_are_checked_too(
    engines: StockEngines, checkpoints: Checkpoints, right: RightTokens
) -> None:
    with s3_server() as server:
        assert request(server, "PUT", "/kv-tier")[0] == 200
        tier = documented_tier(1, bucket="kv-tier", endpoint=f"http://{server}")
        engine = engines.start(checkpoints.first, tier)
        assert tokens(engine, PROMPTS[:1]) == right.first[:1]
        forget_prompts(engine)
        assert engine.ask(PROMPTS[0]) == [{"tokens": right.first[0], "cached": STORED_TOKENS}]
        forget_prompts(engine)
        for name in keys_of(server, "/kv-tier"):
            status, data = request(server, "GET", f"/kv-tier/{name}")
            damaged = data[:-1] + bytes([data[-1] ^ 1])
            assert status == request(server, "PUT", f"/kv-tier/{name}", damaged)[0] == 200
        assert engine.ask(PROMPTS[0]) == [{"tokens": right.first[0], "cached": 0}]
        assert engine.metrics()["loads_total refused"] == NUM_CHUNKS
        forget_prompts(engine)
    # The server is gone.
    assert engine.ask(PROMPTS[1]) == [{"tokens": right.first[1], "cached": 0}]
    engine.close()


def keys_of(server: Address, path: str) -> list[str]:
    status, listing = request(server, "GET", path)
    assert status == 200
    return [name for name in re.findall(r"<Key>([^<]*)</Key>", listing.decode()) if "." not in name]
