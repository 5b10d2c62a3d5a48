"""Step 1 of 3: fetch the texts, train the tokenizer and write the token ids.

    python scripts/train_model/prepare.py build/train

Needs `tokenizers` and `numpy`. The folder then has all that `train.py` needs, about 10 MB.
"""

import random
import sys
from pathlib import Path

import numpy as np
from corpus import fetch_books, make_chats
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

VOCAB_SIZE = 4096
END_OF_TEXT, START_OF_TURN, END_OF_TURN, PAD = SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|pad|>",
)
NUM_CHATS = 16_000
VALID_PARAGRAPHS = 40
"""Of this many consecutive paragraphs, the last two are held out."""
SEED = 1


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    books = fetch_books(folder.parent / "packages")
    chats = [_render(chat) for chat in make_chats(books, NUM_CHATS, SEED)]
    train, valid = [], []
    for book in books:
        parts = {True: [], False: []}
        for number, paragraph in enumerate(book.paragraphs):
            parts[number % VALID_PARAGRAPHS >= VALID_PARAGRAPHS - 2].append(paragraph)
        train.append("\n\n".join(parts[False]))
        valid.append("\n\n".join(parts[True]))
    random.Random(SEED).shuffle(train)
    tokenizer = _train_tokenizer(train, chats)
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, texts in (("train", train), ("valid", valid), ("chats", chats)):
        ids = [np.array(tokenizer.encode(text + END_OF_TEXT).ids, np.uint16) for text in texts]
        np.save(folder / f"{name}.npy", np.concatenate(ids))
        print(
            f"{name}: {len(texts)} texts, {sum(map(len, texts))} characters, "
            f"{sum(map(len, ids))} tokens"
        )


def _render(chat: list[tuple[str, str]]) -> str:
    """Return the chat as the template of the model renders it."""
    return "".join(f"{START_OF_TURN}{role}\n{text}{END_OF_TURN}\n" for role, text in chat)


def _train_tokenizer(train: list[str], chats: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=VOCAB_SIZE,
        initial_alphabet=sorted(ByteLevel.alphabet()),
        special_tokens=[AddedToken(t, special=True, normalized=False) for t in SPECIAL_TOKENS],
        show_progress=False,
    )
    tokenizer.train_from_iterator([*train, *chats[:2000]], trainer)
    return tokenizer


if __name__ == "__main__":
    main(Path(sys.argv[1]))
