"""Three sources of PG-19 give the same books, and what is wrong with one is a single line."""

import csv
import hashlib
import json
import lzma

import pytest

from smat.data.books import SPLITS, read_books
from smat.data.shards import MANIFEST, prepare_tokens
from smat.data.tokens import byte_encoder


def books_of(source):
    return {split: list(read_books(source, split)) for split in SPLITS}


@pytest.fixture
def with_table(books_folder, tmp_path):
    """Pack the books as one file a split, with a table of offsets and hashes."""
    (tmp_path / "books").mkdir()
    rows = []
    for split, books in books_of(books_folder).items():
        offset = 0
        for name, text in books:
            rows.append([split, name, offset, len(text), hashlib.sha256(text).hexdigest()])
            offset += len(text)
        packed = lzma.compress(b"".join(text for _, text in books))
        (tmp_path / "books" / f"{split}.txt.xz").write_bytes(packed)
    with (tmp_path / "MANIFEST.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["split", "gutenberg_id", "offset", "bytes", "sha256"])
        writer.writerows(reversed(rows))  # in any order
    return tmp_path


def test_a_table_of_offsets_gives_the_books_of_the_folder(books_folder, with_table, tmp_path):
    assert books_of(with_table) == books_of(books_folder)
    manifests = []
    for name, source in (("a", books_folder), ("b", with_table)):
        prepare_tokens(source, tmp_path / name, byte_encoder())
        manifests.append((tmp_path / name / "bytes" / MANIFEST).read_bytes())
    assert manifests[0] == manifests[1]


@pytest.mark.parametrize("kind", ["arrow", "parquet"])
def test_a_dataset_on_disk_gives_the_books_of_the_folder(books_folder, tmp_path, kind):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    for split, books in books_of(books_folder).items():
        urls = [f"http://www.gutenberg.org/ebooks/{name}" for name, _ in books]
        table = arrow.table({"url": urls, "text": [text.decode() for _, text in books]})
        if kind == "parquet":
            (tmp_path / "data").mkdir(exist_ok=True)
            parquet.write_table(table, tmp_path / "data" / f"{split}-00000-of-00001.parquet")
            continue
        (tmp_path / split).mkdir()
        (tmp_path / split / "cache-1f.arrow").write_bytes(b"what a library left")
        path = str(tmp_path / split / "data-00000-of-00001.arrow")
        with arrow.OSFile(path, "wb") as file, arrow.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table)
    assert books_of(tmp_path) == books_of(books_folder)


def test_line_ends_are_those_of_unix(tmp_path):
    for split in SPLITS:
        (tmp_path / split).mkdir()
        (tmp_path / split / "7.txt").write_bytes(b"one\r\ntwo\r\n")
    assert books_of(tmp_path)["test"] == [("7", b"one\ntwo\n")]


def damage_table(folder, **changes):
    path = folder / "MANIFEST.csv"
    with path.open(newline="") as file:
        rows = [row | changes for row in csv.DictReader(file)]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [name for name in rows[0] if rows[0][name] is not None])
        writer.writeheader()
        writer.writerows({name: row[name] for name in writer.fieldnames} for row in rows)


def cut(folder):
    path = folder / "books" / "train.txt.xz"
    path.write_bytes(path.read_bytes()[:-40])


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda folder: damage_table(folder, sha256="0" * 64), "train book 1 at offset 0 is not"),
        (lambda folder: damage_table(folder, sha256=None), "has no column sha256"),
        (lambda folder: damage_table(folder, split="other"), "no train books in"),
        (lambda folder: (folder / "books" / "train.txt.xz").unlink(), "train.txt.xz is missing"),
        (cut, "train.txt.xz is damaged, get it anew"),
    ],
    ids=["hash", "column", "split", "missing", "cut"],
)
def test_wrong_data_is_one_line(with_table, damage, words):
    damage(with_table)
    with pytest.raises(ValueError, match=words):
        list(read_books(with_table, "train"))


def test_text_must_be_utf8_and_a_folder_must_have_books(tmp_path):
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "3.txt").write_bytes(b"caf\xe9")
    with pytest.raises(ValueError, match="train book 3 is not UTF-8"):
        list(read_books(tmp_path, "train"))
    with pytest.raises(ValueError, match="no test books in"):
        list(read_books(tmp_path, "test"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"no PG-19 in .*empty; it takes folders train"):
        list(read_books(tmp_path / "empty", "test"))


def test_a_dataset_without_pyarrow_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "data-00000-of-00001.arrow").write_bytes(b"")
    (tmp_path / "dataset_dict.json").write_text(json.dumps({"splits": ["train"]}))
    with pytest.raises(ImportError, match=r'pyarrow is not installed; .*"smat\[data\]"'):
        list(read_books(tmp_path, "train"))
