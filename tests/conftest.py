"""What every test shares: examples are drawn alike in every run, and books are made up."""

import random

import pytest
from hypothesis import HealthCheck, settings

from smat.data.shards import DATA_VARIABLE, prepare_tokens
from smat.data.tokens import make_encoder

settings.register_profile(
    "smat", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("smat")


def made_up_book(seed, num_words=3000):
    """Write a book of made-up words, a few of them much more often than the others."""
    drawn = random.Random(seed)
    syllables = ["ka", "lo", "mi", "ne", "tu", "ra", "so", "vi"]
    words = ["".join(drawn.choices(syllables, k=drawn.randint(1, 3))) for _ in range(50)]
    text = " ".join(drawn.choices(words, weights=range(50, 0, -1), k=num_words))
    return f"A book of number {seed}\n\n{text}.\n"


@pytest.fixture(scope="session")
def books_folder(tmp_path_factory):
    """Make a folder as PG-19's official one: text files, by split."""
    folder = tmp_path_factory.mktemp("books")
    for split, seeds in (("train", (1, 2, 3)), ("validation", (4,)), ("test", (5, 6))):
        (folder / split).mkdir()
        for seed in seeds:
            (folder / split / f"{seed}.txt").write_text(made_up_book(seed))
    return folder


@pytest.fixture(scope="session")
def token_folder(books_folder, tmp_path_factory):
    """Prepare the made-up books in bytes and in 300 tokens of their own."""
    out = tmp_path_factory.mktemp("tokens")
    texts = [path.read_bytes() for path in sorted((books_folder / "train").iterdir())]
    for name in ("bytes", "bpe300"):
        prepare_tokens(books_folder, out, make_encoder(name, lambda: texts))
    return out


@pytest.fixture
def prepared(token_folder, monkeypatch):
    """Let SMAT_DATA name the made-up books."""
    monkeypatch.setenv(DATA_VARIABLE, str(token_folder))
    return token_folder
