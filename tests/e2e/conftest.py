"""One made model for all end-to-end tests, and clusters that several tests share."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e.harness import Cluster, Prompt

from kvferry.engine.make_model import make_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model") / "tiny"
    make_model(directory)
    return directory


@pytest.fixture
def cluster(tmp_path: Path, model: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path, model) as made:
        yield made


def random_prompts(count: int, seed: int, longest: int = 1500) -> list[Prompt]:
    """Lengths from 1 to `longest`, many short; some share prefixes, some are repeated."""
    rng = random.Random(seed)
    prompts: list[Prompt] = []
    for _ in range(count):
        length = min(longest, int(longest ** rng.random()) + 1)
        token_ids = tuple(rng.randrange(10, 500) for _ in range(length))
        if prompts and rng.random() < 0.3:
            earlier = rng.choice(prompts).token_ids
            token_ids = (earlier[: rng.randrange(len(earlier) + 1)] + token_ids)[:longest]
        prompts.append(Prompt(token_ids))
    prompts[0] = Prompt(prompts[0].token_ids[:1])
    prompts[1] = Prompt(tuple(rng.randrange(10, 500) for _ in range(longest)))
    return prompts
