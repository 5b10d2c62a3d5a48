"""The tokenizer of generated models: byte-level BPE over 256 bytes and prefixes of common words.

Encoding and decoding return any text unchanged. The merges are derived from the word list below,
not trained, so that the file is the same with every version of the library. Pure.
"""

from collections.abc import Iterator
from functools import cache

from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

VOCAB_SIZE = 512
EOS_TOKEN = "<|endoftext|>"
START_OF_TURN_TOKEN = "<|im_start|>"
END_OF_TURN_TOKEN = "<|im_end|>"
PAD_TOKEN = "<|pad|>"
BOS_TOKEN = EOS_TOKEN
SPECIAL_TOKENS = (EOS_TOKEN, START_OF_TURN_TOKEN, END_OF_TURN_TOKEN, PAD_TOKEN)

SPACE = "Ġ"
"""The character with which byte-level BPE writes a space."""

WORDS = (
    "the and ing ion to of in a that is was he for it with as his on be at by had not are but "
    "from or have an they which one you "
    "were all her she there would their we him been has when who will no more if out so up said "
    "what its about than into them can "
    "only other time new some could these two may first then do any like my now over such our man "
    "me even most made after also did "
    "many off before must well back through years much where your way down should because long "
    "each just state those people too mr "
    "how little good world make very year still see work life being day under never same another "
    "know while last might us great "
    "old since against go came right take three"
)

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def make_tokenizer_json() -> str:
    tokenizer = Tokenizer(BPE(vocab=_vocabulary(), merges=_merges()))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    )
    text: str = tokenizer.to_str(pretty=True)
    return text


def token_id(special_token: str) -> int:
    return VOCAB_SIZE - len(SPECIAL_TOKENS) + SPECIAL_TOKENS.index(special_token)


def readable_token_ids() -> list[int]:
    """Return the ids of tokens that consist of printable ASCII characters and spaces."""
    return [
        number
        for token, number in _vocabulary().items()
        if all("!" <= char <= "~" or char == SPACE for char in token)
    ]


@cache
def _merges() -> list[tuple[str, str]]:
    """Return as many merges as the vocabulary has room for."""
    merges: dict[str, tuple[str, str]] = {}
    for word in _word_forms():
        for length in range(2, len(word) + 1):
            merges.setdefault(word[:length], (word[: length - 1], word[length - 1]))
    return list(merges.values())[: VOCAB_SIZE - 256 - len(SPECIAL_TOKENS)]


def _word_forms() -> Iterator[str]:
    for word in WORDS.split():
        yield SPACE + word
    for word in WORDS.split():
        yield word


def _vocabulary() -> dict[str, int]:
    tokens = sorted(ByteLevel.alphabet()) + [first + second for first, second in _merges()]
    return {token: number for number, token in enumerate(tokens)}
