"""Tests the model that comes with kvferry: it is complete, small, and sensitive to its KV."""

from tests.engine.ranks import greedy, one_rank, prefill
from tokenizers import Tokenizer

from kvferry.cli.checkpoints import DEFAULT_MODEL
from kvferry.engine.cache.layout import form_groups
from kvferry.engine.model.config import SamplingDefaults, read_model_config
from kvferry.engine.options import EngineOptions

BLOCK_SIZE = 16
NUM_TOKENS = 10
WORDS = ("garden", "window", "paper", "winter", "music")
TEXT = (
    "The morning was cold, and the old man walked slowly along the river. He had lived in the "
    "village for many years, and he knew every house and every tree. When he came to the bridge, "
    "he stopped and looked at the water. A boat was coming down the stream, and in the boat there "
    "sat a young woman with a letter in her hand. "
)


def test_it_is_small_and_has_all_files() -> None:
    sizes = {path.name: path.stat().st_size for path in DEFAULT_MODEL.iterdir()}
    assert set(sizes) == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert sum(sizes.values()) < 8_000_000
    assert read_model_config(DEFAULT_MODEL).sampling == SamplingDefaults(0.7, 0.9)


def test_one_wrong_block_changes_the_answer() -> None:
    """The first blocks of the prompts differ in one word, which the model has to repeat."""
    tokenizer = Tokenizer.from_file(str(DEFAULT_MODEL / "tokenizer.json"))
    prompts = [
        tokenizer.encode(
            f"<|im_start|>user\nThe secret word is {word}. {TEXT}What is the secret word?<|im_end|>"
            "\n<|im_start|>assistant\n"
        ).ids
        for word in WORDS
    ]
    count = (len(prompts[0]) + NUM_TOKENS) // BLOCK_SIZE + 1
    tables = [(tuple(range(n * count, (n + 1) * count)),) for n in range(len(prompts))]
    with one_rank(EngineOptions(model=DEFAULT_MODEL, num_blocks=count * len(prompts))) as runner:
        for prompt, table in zip(prompts, tables, strict=True):
            assert len(prompt) > 5 * BLOCK_SIZE
            prefill(runner, prompt, table)
        right = greedy(runner, prompts, tables, NUM_TOKENS)
        (group,) = form_groups(runner.config)
        for name in group.layer_names:
            cache, before = runner.kv_caches[name], runner.kv_caches[name].clone()
            for number, table in enumerate(tables):
                cache[table[0][0]] = before[tables[number - 1][0][0]]
        wrong = greedy(runner, prompts, tables, NUM_TOKENS)
    answers = [tokenizer.decode(answer) for answer in right]
    assert [word for word, text in zip(WORDS, answers, strict=True) if word in text] == [*WORDS]
    assert [w for w, one, other in zip(WORDS, right, wrong, strict=True) if one == other] == []
