"""Token shards: written split by split with a manifest of hashes, mapped into memory."""

from __future__ import annotations

import csv
import hashlib
import json
import os
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from smat.data.books import SPLITS, read_books
from smat.data.tokens import Encoder

VERSION = 1
MANIFEST = "manifest.json"
DATA_VARIABLE = "SMAT_DATA"
SHARD_TOKENS = 1 << 28
DTYPES = {1: torch.uint8, 2: torch.uint16}
PREPARE = "smat data prepare FOLDER_OF_PG19 --out DATA --tokens"


def data_folder(tokens: str) -> Path:
    """Return the folder of shards of some tokens below the one that SMAT_DATA names."""
    root = os.environ.get(DATA_VARIABLE, "")
    if not root:
        how = f"name a folder of it with --data or {DATA_VARIABLE}, and make one with: {PREPARE}"
        raise ValueError(f"this needs text as tokens ({tokens}); {how} {tokens}")
    return Path(root) / tokens


def prepare_tokens(
    source: Path, out: Path, encoder: Encoder, shard_tokens: int = SHARD_TOKENS
) -> dict[str, Any]:
    """Write the shards of all splits into ``out / encoder.name`` and return their manifest.

    The manifest is written last, so what an interruption leaves is not taken for data. It tells of
    the tokens alone: the same text from another source has the same manifest, byte for byte.
    """
    folder = out / encoder.name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MANIFEST).unlink(missing_ok=True)
    manifest: dict[str, Any] = {
        "version": VERSION, "tokens": encoder.name, "vocab_size": encoder.vocab_size,
        "end_of_book": encoder.end_of_book, "item_size": encoder.item_size, "splits": {},
    }  # fmt: skip
    counts: dict[str, Tensor] = {}
    with (folder / "books.csv").open("w", newline="", encoding="utf-8") as table:
        rows = csv.writer(table, lineterminator="\n")
        rows.writerow(["split", "name", "offset", "num_tokens", "num_bytes", "sha256"])
        for split in SPLITS:
            writer = _ShardWriter(folder, split, encoder, shard_tokens)
            num_books = num_bytes = 0
            for name, text in read_books(source, split):
                offset = writer.num_tokens
                writer.write(encoder.encode(text) + encoder.end)
                digest = hashlib.sha256(text).hexdigest()
                length = writer.num_tokens - offset
                rows.writerow([split, name, offset, length, len(text), digest])
                num_books, num_bytes = num_books + 1, num_bytes + len(text)
            counts[split] = writer.counts
            sizes = {"books": num_books, "bytes": num_bytes, "tokens": writer.num_tokens}
            manifest["splits"][split] = {**sizes, "shards": writer.close()}
    for split, found in counts.items():
        manifest["splits"][split]["unigram_nats"] = _unigram_nats(counts["train"], found)
    if encoder.vocabulary is not None:
        (folder / "tokenizer.json").write_text(encoder.vocabulary, encoding="utf-8")
    names = ["books.csv", *["tokenizer.json"] * (encoder.vocabulary is not None)]
    manifest["files"] = {name: _hash_of(folder / name) for name in names}
    temporary = folder / f".{MANIFEST}.tmp"
    temporary.write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    temporary.replace(folder / MANIFEST)
    return manifest


def _unigram_nats(train: Tensor, counts: Tensor) -> float:
    """Return the loss of predicting every token by how often it was in training, plus one."""
    log_probability = ((train + 1).double() / (train + 1).sum()).log()
    return round(-(log_probability * counts).sum().item() / int(counts.sum()), 6)


class _ShardWriter:
    """Appends tokens to a split's shards, none longer than it should be."""

    def __init__(self, folder: Path, split: str, encoder: Encoder, shard_tokens: int) -> None:
        self.folder, self.split, self.item_size = folder, split, encoder.item_size
        self.shard_bytes = shard_tokens * encoder.item_size
        self.num_tokens = 0
        self.counts = torch.zeros(encoder.vocab_size, dtype=torch.long)
        self.shards: list[dict[str, Any]] = []
        self.file: BinaryIO | None = None

    def write(self, ids: bytes) -> None:
        content = memoryview(ids)
        read = torch.frombuffer(bytearray(ids), dtype=DTYPES[self.item_size])
        self.counts += torch.bincount(read.long(), minlength=len(self.counts))
        self.num_tokens += len(ids) // self.item_size
        while content:
            if self.file is None:
                name = f"{self.split}-{len(self.shards):04}.bin"
                self.shards.append({"file": name, "tokens": 0})
                self.file, self.hash = (self.folder / name).open("wb"), hashlib.sha256()
            room = self.shard_bytes - self.file.tell()
            piece, content = content[:room], content[room:]
            self.file.write(piece)
            self.hash.update(piece)
            self.shards[-1]["tokens"] += len(piece) // self.item_size
            if len(piece) == room:
                self.close()

    def close(self) -> list[dict[str, Any]]:
        """End the shard, and return what is known of all of them."""
        if self.file is not None:
            self.file.close()
            self.shards[-1]["sha256"] = self.hash.hexdigest()
            self.file = None
        return self.shards


class TokenSplit:
    """The tokens of a split as one row, of which only what is asked for is read."""

    def __init__(
        self, name: str, paths: Sequence[Path], sizes: Sequence[int], item_size: int
    ) -> None:
        dtype = DTYPES[item_size]
        self.name = name
        self.shards = [
            torch.from_file(str(path), shared=False, size=size, dtype=dtype)
            for path, size in zip(paths, sizes, strict=True)
        ]
        self.ends = list(accumulate(sizes))

    def __len__(self) -> int:
        return self.ends[-1]

    def read(self, start: int, length: int) -> Tensor:
        """Return ``length`` token ids from ``start`` on, as int64."""
        if not 0 <= start <= start + length <= len(self):
            asked = f"{length} tokens from {start} on"
            raise ValueError(f"{asked} were asked for, but {self.name} has {len(self)}")
        pieces: list[Tensor] = []
        while length or not pieces:
            number = min(bisect_right(self.ends, start), len(self.ends) - 1)
            begin = start - (self.ends[number - 1] if number else 0)
            piece = self.shards[number][begin : begin + length].long()
            pieces.append(piece)
            start, length = start + len(piece), length - len(piece)
        return torch.cat(pieces)

    def excerpts(self, numbers: Iterable[int], length: int) -> Tensor:
        """Return excerpts of the packed text, (B, length + 1): each ends with its last target."""
        return torch.stack([self.read(number * length, length + 1) for number in numbers])

    def num_excerpts(self, length: int) -> int:
        """Count the excerpts that do not overlap, but for the target of the last token."""
        count = (len(self) - 1) // length
        if count < 1:
            needed = f"an excerpt of {length} needs {length + 1}"
            raise ValueError(f"{self.name} has {len(self)} tokens, but {needed}")
        return count


def read_manifest(folder: Path, vocab_size: int | None = None) -> dict[str, Any]:
    """Return the manifest of prepared tokens, or say in one line what is missing or wrong."""
    anew = f"make it anew: {PREPARE} {folder.name}"
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        shards = [each for split in SPLITS for each in manifest["splits"][split]["shards"]]
        files = [(each["file"], each["tokens"]) for each in shards]
        known = manifest["version"] == VERSION
        item_size = manifest["item_size"]
    except FileNotFoundError:
        raise ValueError(f"{folder} has no prepared tokens; {anew}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder / MANIFEST} is damaged ({error!r}); {anew}") from None
    if not known:
        raise ValueError(f"{folder} is of version {manifest['version']}, not {VERSION}; {anew}")
    for name, tokens in files:
        path, size = folder / name, tokens * item_size
        found = path.stat().st_size if path.is_file() else None
        if found != size:
            has = "is missing" if found is None else f"has {found} bytes, not {size}"
            raise ValueError(f"{path} {has}; {anew}")
    if vocab_size not in (None, manifest["vocab_size"]):
        has = f"{folder} has a vocabulary of {manifest['vocab_size']} tokens"
        raise ValueError(f"{has}, but this run is for one of {vocab_size}")
    return manifest


def check_hashes(folder: Path) -> int:
    """Compare every file with its hash in the manifest, and return how many there are."""
    manifest = read_manifest(folder)
    shards = [each for split in manifest["splits"].values() for each in split["shards"]]
    hashes = {each["file"]: each["sha256"] for each in shards} | manifest["files"]
    for name, digest in hashes.items():
        if _hash_of(folder / name) != digest:
            raise ValueError(f"{folder / name} is not what {MANIFEST} has the hash of")
    return len(hashes)


@lru_cache(maxsize=16)
def open_split(folder: Path, split: str, vocab_size: int | None = None) -> TokenSplit:
    """Map the shards of a split into memory."""
    manifest = read_manifest(folder, vocab_size)
    shards = manifest["splits"][split]["shards"]
    paths, sizes = [folder / each["file"] for each in shards], [each["tokens"] for each in shards]
    return TokenSplit(f"{split} of {folder}", paths, sizes, manifest["item_size"])


def _hash_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()
