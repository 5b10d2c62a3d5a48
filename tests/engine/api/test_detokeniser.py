import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders
from tokenizers.models import BPE

from kvferry.engine.api.tokenizer import ModelTokenizer, SpecialTokens, WindowDetokeniser
from kvferry.engine.make_model.tokenizer import VOCAB_SIZE, make_tokenizer_json
from kvferry.errors import ConfigError

RAW = Tokenizer.from_str(make_tokenizer_json())
BYTE_LEVEL = ModelTokenizer(Tokenizer.from_str(make_tokenizer_json()))
ids = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=40)


def sentencepiece_like() -> Tokenizer:
    """A tokenizer like Llama 2's: it marks spaces with a special character, encodes characters
    outside the vocabulary as byte tokens, and drops one leading space.
    """
    chunks = ["<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁the", "▁a", "é"]
    tokenizer = Tokenizer(
        BPE(
            vocab={chunk: index for index, chunk in enumerate(chunks)},
            merges=[],
            byte_fallback=True,
        )
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    return tokenizer


@given(ids)
def test_byte_level_segments_concatenate_to_the_whole(token_ids: list[int]) -> None:
    assert BYTE_LEVEL.decode(token_ids, SpecialTokens.WITH) == RAW.decode(
        token_ids, skip_special_tokens=False
    )


@given(ids)
def test_special_tokens_are_left_out_on_request(token_ids: list[int]) -> None:
    assert BYTE_LEVEL.decode(token_ids, SpecialTokens.WITHOUT) == RAW.decode(
        token_ids, skip_special_tokens=True
    )


@given(st.text(max_size=60))
def test_no_segment_holds_half_a_character(text: str) -> None:
    detokeniser = BYTE_LEVEL.detokeniser(SpecialTokens.WITHOUT)
    chunks = [
        detokeniser.push(token_id) for token_id in BYTE_LEVEL.encode(text, SpecialTokens.WITHOUT)
    ]
    assert "".join(chunks) == text
    assert "\ufffd" not in "".join(chunks) or "\ufffd" in text
    assert detokeniser.finish() == ""


def test_a_character_cut_off_at_the_end_is_one_replacement_character() -> None:
    euro = BYTE_LEVEL.encode("€", SpecialTokens.WITHOUT)
    assert len(euro) == 3
    assert BYTE_LEVEL.decode(euro[:2], SpecialTokens.WITHOUT) == "\ufffd"


def test_added_tokens_stand_for_themselves() -> None:
    raw = Tokenizer.from_str(make_tokenizer_json())
    raw.add_tokens(["a b", "€uro"])
    tokenizer = ModelTokenizer(raw)
    token_ids = [512, 513, *raw.encode("x").ids]
    assert tokenizer.decode(token_ids, SpecialTokens.WITH) == raw.decode(token_ids) == "a b€urox"


def test_an_id_that_the_vocabulary_does_not_know_is_no_text() -> None:
    assert BYTE_LEVEL.decode([100_000], SpecialTokens.WITH) == ""
    assert BYTE_LEVEL.text_of(100_000) == ""


words = st.lists(st.sampled_from(["▁the", "▁a", "a", "b", "é", "▁", "euro", "<s>"]), max_size=30)


@given(words)
def test_with_any_decoder_segments_concatenate_to_the_whole(chunks: list[str]) -> None:
    raw = sentencepiece_like()
    vocabulary = raw.get_vocab()
    euro = [vocabulary[f"<0x{byte:02X}>"] for byte in "€".encode()]
    token_ids = [
        token_id
        for chunk in chunks
        for token_id in (euro if chunk == "euro" else [vocabulary[chunk]])
    ]
    assert ModelTokenizer(raw).decode(token_ids, SpecialTokens.WITHOUT) == raw.decode(
        token_ids, skip_special_tokens=True
    )


@given(st.lists(st.integers(0, 262), max_size=60))
def test_with_any_decoder_garbage_never_makes_the_window_grow(token_ids: list[int]) -> None:
    raw = sentencepiece_like()
    longest = 0

    def decode(window: object) -> str:
        nonlocal longest
        assert isinstance(window, list)
        longest = max(longest, len(window))
        return str(raw.decode(window, skip_special_tokens=False))

    detokeniser = WindowDetokeniser(decode)
    for token_id in token_ids:
        detokeniser.push(token_id)
    detokeniser.finish()
    assert longest <= 8


def test_a_folder_without_a_tokenizer_is_the_operators_fault(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        ModelTokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0"}))
    with pytest.raises(ConfigError, match="cannot be read as a tokenizer"):
        ModelTokenizer.load(tmp_path)
