"""Tests generated models, which are complete, repeatable, and sensitive to every block of KV."""

import json
import random
from dataclasses import dataclass
from pathlib import Path

import pytest
import transformers
from tests.engine.ranks import Tables, greedy, one_rank, prefill
from tests.sampling import exhaustive
from tokenizers import Tokenizer

from kvferry.engine.cache.layout import form_groups
from kvferry.engine.make_model.writer import make_model
from kvferry.engine.model.config import read_model_config
from kvferry.engine.options import EngineOptions
from kvferry.engine.runner import Runner
from kvferry.errors import ConfigError

FILES = [
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
]
BLOCK_SIZE = 16
NUM_TOKENS = 32


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    make_model(directory)
    return directory


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


def test_the_same_seed_makes_the_same_bytes_and_another_does_not(
    model: Path, tmp_path: Path
) -> None:
    make_model(tmp_path / "again")
    make_model(tmp_path / "other", seed=1)
    assert list(contents(model)) == FILES
    assert contents(tmp_path / "again") == contents(model)
    assert contents(tmp_path / "other")["model.safetensors"] != contents(model)["model.safetensors"]


def test_a_made_model_is_made_anew_and_other_files_beside_it_stay(tmp_path: Path) -> None:
    make_model(tmp_path, family="llama", seed=5)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "model.safetensors").write_bytes(b"damaged")
    make_model(tmp_path)
    assert read_model_config(tmp_path).architecture == "Qwen3ForCausalLM"
    assert (tmp_path / "model.safetensors").stat().st_size > 1_000_000
    assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("name", ["notes.txt", "config.json"])
def test_a_folder_of_somebody_else_is_refused_and_left_alone(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("{}")
    with pytest.raises(ConfigError, match="is not empty and was not made by make-model"):
        make_model(tmp_path)
    assert contents(tmp_path) == {name: b"{}"}


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        make_model(tmp_path / "file")


def test_unknown_settings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match="family must be one of qwen3, llama, mla, window, hybrid"
    ):
        make_model(tmp_path, family="gpt")
    with pytest.raises(ConfigError, match="size must be one of tiny"):
        make_model(tmp_path, size="huge")
    with pytest.raises(ConfigError, match="seed must be from 0"):
        make_model(tmp_path, seed=-1)


def test_any_text_comes_back_from_the_tokenizer(model: Path) -> None:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == read_model_config(model).vocab_size
    for text in ("The world is there.", "  two  spaces\n\ttab", "naïve 😀 \x00 中文", ""):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert len(tokenizer.encode("the world").ids) < len("the world")
    assert tokenizer.encode("<|im_end|>").ids == [read_model_config(model).eos_token_ids[1]]


def test_transformers_takes_the_tokenizer_and_its_chat_template(model: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert (
        json.loads((model / "config.json").read_bytes())["eos_token_id"] == tokenizer.eos_token_id
    )


def random_prompts(lengths: list[int]) -> list[list[int]]:
    generator = random.Random(11)
    return [[generator.randrange(508) for _ in range(length)] for length in lengths]


def load_prompts(runner: Runner, prompts: list[list[int]]) -> list[Tables]:
    """Prefill every prompt into separate blocks, with room for the answer."""
    groups = form_groups(runner.config)
    tables: list[Tables] = []
    used = 0
    for prompt in prompts:
        count = -(-(len(prompt) + NUM_TOKENS) // BLOCK_SIZE)
        tables.append(
            tuple(
                tuple(range(used + index * count, used + (index + 1) * count))
                for index, _ in enumerate(groups)
            )
        )
        prefill(runner, prompt, tables[-1])
        used += count * len(groups)
    return tables


@dataclass(frozen=True)
class Swap:
    """Corrupts one block of each prompt, in the given layers of one group."""

    group: int
    layers: tuple[str, ...]
    seed: int

    def apply(self, runner: Runner, prompts: list[list[int]], tables: list[Tables]) -> None:
        """In each prompt, replace one random full block by the last full block of another prompt.
        The next token attends to every token of the replaced block.
        """
        generator = random.Random(self.seed)
        group = form_groups(runner.config)[self.group]
        before = {name: runner.kv_caches[name].clone() for name in self.layers}
        ends = [(len(prompt) - 1) // BLOCK_SIZE for prompt in prompts]
        for number, (prompt, table) in enumerate(zip(prompts, tables, strict=True)):
            first = -(-group.first_visible_token(len(prompt) - 1) // BLOCK_SIZE)
            victim = table[self.group][generator.randrange(first, ends[number])]
            for name in self.layers:
                runner.kv_caches[name][victim] = before[name][
                    tables[number - 1][self.group][ends[number - 1] - 1]
                ]


LENGTHS = [
    20,
    25,
    33,
    40,
    50,
    64,
    80,
    100,
    120,
    150,
    180,
    220,
    260,
    320,
    400,
    500,
    640,
    900,
    1200,
    1500,
]


@pytest.mark.parametrize("family", ["qwen3", "llama", "mla", "window"])
@pytest.mark.parametrize(
    "lengths", [LENGTHS[::4], pytest.param(LENGTHS, marks=exhaustive)], ids=["few", "all"]
)
def test_one_wrong_block_anywhere_changes_the_greedy_tokens(
    tmp_path: Path, family: str, lengths: list[int]
) -> None:
    make_model(tmp_path, family=family)
    prompts = random_prompts(lengths)
    with one_rank(EngineOptions(model=tmp_path, num_blocks=800)) as runner:
        tables = load_prompts(runner, prompts)
        clean = {name: cache.clone() for name, cache in runner.kv_caches.items()}
        right = greedy(runner, prompts, tables, NUM_TOKENS)

        def unseen(swap: Swap) -> list[int]:
            """Lengths of the prompts whose answer stays the same although a block is wrong."""
            for name, cache in runner.kv_caches.items():
                cache.copy_(clean[name])
            swap.apply(runner, prompts, tables)
            wrong = greedy(runner, prompts, tables, NUM_TOKENS)
            return [
                len(prompt)
                for prompt, one, other in zip(prompts, right, wrong, strict=True)
                if one == other
            ]

        groups = list(enumerate(form_groups(runner.config)))
        assert [unseen(Swap(index, group.layer_names, seed=0)) for index, group in groups] == [
            [] for _ in groups
        ]
        # If only one layer is wrong, about one change in a hundred does not show within 32 tokens.
        swaps = [
            Swap(index, (name,), seed)
            for index, group in groups
            for seed, name in enumerate(group.layer_names)
        ]
        in_one_layer = [length for swap in swaps for length in unseen(swap)]
        assert len(in_one_layer) <= 0.05 * len(swaps) * len(prompts)
        for name, cache in runner.kv_caches.items():
            cache.copy_(clean[name])
        assert greedy(runner, prompts, tables, NUM_TOKENS) == right


@pytest.mark.parametrize("family", ["qwen3", "mla", "window", "hybrid"])
def test_greedy_text_neither_repeats_itself_nor_ends(tmp_path: Path, family: str) -> None:
    make_model(tmp_path, family=family)
    prompts = random_prompts([1, 5, 17, 40, 100, 300])
    with one_rank(EngineOptions(model=tmp_path, num_blocks=160)) as runner:
        answers = greedy(runner, prompts, load_prompts(runner, prompts), NUM_TOKENS)
    assert min(len(set(answer)) for answer in answers) >= NUM_TOKENS // 2
    assert not set(read_model_config(tmp_path).eos_token_ids) & {
        token for answer in answers for token in answer
    }
