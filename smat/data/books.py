"""Read PG-19, book by book: its official folder, a Hugging Face dataset, or text with offsets."""

from __future__ import annotations

import csv
import hashlib
import lzma
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from smat.extras import require

SPLITS = ("train", "validation", "test")
NUM_OFFICIAL = {"train": 28_602, "validation": 50, "test": 100}
TABLE = "MANIFEST.csv"
WANTED = (
    "folders train, validation and test of .txt files as at gs://deepmind-gutenberg, a Hugging "
    f"Face dataset on disk (.arrow or .parquet), or {TABLE} beside books/SPLIT.txt.xz"
)


class Book(NamedTuple):
    """A book as UTF-8 with LF line ends, and what its source calls it."""

    name: str
    text: bytes


def read_books(source: Path, split: str) -> Iterator[Book]:
    """Yield the books of a split, one in memory at a time, in an order that the source fixes.

    >>> next(read_books(Path("no/such/folder"), "train"))
    Traceback (most recent call last):
    ValueError: no PG-19 in no/such/folder; it takes folders train, validation and test of ...

    The three sources give the same text: the official files have CR LF, which become LF.
    """
    count = 0
    for name, text in _reader(source)(source, split):
        if not text.isascii():
            try:
                text.decode()
            except UnicodeDecodeError as error:
                raise ValueError(f"{source}: {split} book {name} is not UTF-8: {error}") from None
        count += 1
        yield Book(name, text.replace(b"\r\n", b"\n"))
    if not count:
        raise ValueError(f"no {split} books in {source}; it takes {WANTED}")


def _reader(source: Path) -> Callable[[Path, str], Iterator[Book]]:
    """Tell by its files what a folder is."""
    if (source / TABLE).exists():
        return _of_table
    if any((source / split).is_dir() and any((source / split).glob("*.txt")) for split in SPLITS):
        return _of_files
    if any(_dataset_files(source, split) for split in SPLITS):
        return _of_dataset
    raise ValueError(f"no PG-19 in {source}; it takes {WANTED}")


def _of_files(source: Path, split: str) -> Iterator[Book]:
    for path in sorted((source / split).glob("*.txt")):
        yield Book(path.stem, path.read_bytes())


def _of_table(source: Path, split: str) -> Iterator[Book]:
    """Cut a split's text into books by their offsets, and check the hash of each."""
    path = source / TABLE
    with path.open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row.get("split") == split]
    needed = ("gutenberg_id", "offset", "bytes", "sha256")
    if rows and (missing := [name for name in needed if name not in rows[0]]):
        raise ValueError(f"{path} has no column {', '.join(missing)}")
    if not rows:
        return
    plain = source / "books" / f"{split}.txt"
    packed = plain.with_suffix(".txt.xz")
    if not plain.exists() and not packed.exists():
        raise ValueError(f"{TABLE} of {source} tells of {split} books, but {packed} is missing")
    with plain.open("rb") if plain.exists() else lzma.open(packed) as text:
        for row in sorted(rows, key=lambda row: int(row["offset"])):
            try:
                text.seek(int(row["offset"]))
                book = Book(row["gutenberg_id"], text.read(int(row["bytes"])))
            except (lzma.LZMAError, EOFError) as error:
                raise ValueError(f"{packed} is damaged, get it anew: {error}") from None
            if hashlib.sha256(book.text).hexdigest() != row["sha256"]:
                place = f"{split} book {book.name} at offset {row['offset']}"
                raise ValueError(f"{source}: {place} is not the text that {TABLE} has the hash of")
            yield book


def _dataset_files(source: Path, split: str) -> list[Path]:
    """List a split's files: in a folder of its name, or with it in theirs."""
    files = [path for kind in ("arrow", "parquet") for path in source.rglob(f"*.{kind}")]
    return sorted(
        path
        for path in files
        if not path.name.startswith("cache-")
        and (path.parent.name == split or split in path.stem.split("-"))
    )


def _of_dataset(source: Path, split: str) -> Iterator[Book]:
    arrow = require("pyarrow", extra="data")
    for path in _dataset_files(source, split):
        for batch in _record_batches(arrow, path):
            columns = batch.schema.names
            if "text" not in columns:
                raise ValueError(f"{path} has no column text, but {', '.join(columns)}")
            named = next((name for name in ("url", "short_book_title") if name in columns), None)
            for row in range(batch.num_rows):
                name = path.stem if named is None else str(batch.column(named)[row].as_py())
                yield Book(name.rpartition("/")[2], batch.column("text")[row].as_py().encode())


def _record_batches(arrow: Any, path: Path) -> Iterator[Any]:
    """Yield a file's rows a few at a time; an .arrow file is mapped, not read."""
    if path.suffix == ".parquet":
        parquet = require("pyarrow.parquet", extra="data")
        yield from parquet.ParquetFile(path).iter_batches(batch_size=16)
        return
    try:
        with arrow.memory_map(str(path)) as file:
            yield from arrow.ipc.open_stream(file)
    except arrow.ArrowInvalid as error:
        raise ValueError(f"{path} is no Arrow stream: {error}") from None
