"""Token shards: what is written is read back, across shards, and damage is one line."""

import json
import re

import pytest
import torch

from smat.__main__ import main
from smat.data.books import read_books
from smat.data.shards import (
    MANIFEST,
    check_hashes,
    data_folder,
    open_split,
    prepare_tokens,
    read_manifest,
)
from smat.data.tokens import END, byte_encoder, make_encoder

tokenizers = pytest.importorskip("tokenizers")


@pytest.mark.parametrize("shard_tokens", [777, 1 << 20])
def test_bytes_come_back_through_any_shards(books_folder, tmp_path, shard_tokens):
    manifest = prepare_tokens(books_folder, tmp_path, byte_encoder(), shard_tokens)
    for split, told in manifest["splits"].items():
        text = b"".join(book.text + b"\0" for book in read_books(books_folder, split))
        assert told["tokens"] == len(text) == sum(each["tokens"] for each in told["shards"])
        assert len(told["shards"]) == -(-len(text) // shard_tokens)
        found = open_split(tmp_path / "bytes", split)
        assert bytes(found.read(0, len(found)).tolist()) == text
        assert bytes(found.read(700, 900).tolist()) == text[700:1600]
        assert bytes(found.read(len(text) - 1, 1).tolist()) == b"\0"
        excerpts = found.excerpts([3, 0], 100)
        assert excerpts.dtype == torch.long
        assert bytes(excerpts[0].tolist()) == text[300:401]
        assert found.num_excerpts(100) == (len(text) - 1) // 100
        with pytest.raises(ValueError, match=f"1 tokens from {len(text)} on were asked for"):
            found.read(len(text), 1)
    assert check_hashes(tmp_path / "bytes") > 0


def test_a_small_vocabulary_decodes_to_the_text(books_folder, token_folder, tmp_path):
    folder = token_folder / "bpe300"
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = open_split(folder, "test", 300)
    ids = text.read(0, len(text))
    ends = (ids == tokenizer.token_to_id(END)).nonzero().flatten().tolist()
    books = [book.text.decode() for book in read_books(books_folder, "test")]
    assert len(ends) == len(books)
    assert ends[-1] == len(ids) - 1
    assert tokenizer.decode(ids[: ends[0]].tolist()) == books[0]
    assert ids.max() < 300
    assert len(ids) < 0.7 * sum(map(len, books))
    # The same books give the same vocabulary, and so the same shards.
    texts = [book.text for book in read_books(books_folder, "train")]
    again = prepare_tokens(books_folder, tmp_path, make_encoder("bpe300", lambda: texts))
    assert again == read_manifest(folder)


def test_gpt2_takes_files_by_path(books_folder, token_folder, tmp_path):
    saved = json.loads((token_folder / "bpe300" / "tokenizer.json").read_text())
    vocab, merges = tmp_path / "encoder.json", tmp_path / "vocab.bpe"
    vocab.write_text(json.dumps(saved["model"]["vocab"]))
    lines = [" ".join(pair) for pair in saved["model"]["merges"]]
    merges.write_text("\n".join(["#version: 0.2", *lines, ""]))
    encoder = make_encoder("gpt2", list, vocab, merges)
    found = prepare_tokens(books_folder, tmp_path, encoder)
    trained = read_manifest(token_folder / "bpe300")
    for split in ("train", "test"):
        assert found["splits"][split]["shards"] == trained["splits"][split]["shards"]
    merges.write_text("no merges")
    with pytest.raises(ValueError, match="are no vocabulary of GPT-2"):
        make_encoder("gpt2", list, vocab, merges)
    with pytest.raises(ValueError, match=r"no file .*missing.json"):
        make_encoder("gpt2", list, tmp_path / "missing.json", merges)


def test_missing_vocabularies_are_one_line(monkeypatch):
    monkeypatch.setattr("smat.data.tokens.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="gpt2 needs its files: name --vocab"):
        make_encoder("gpt2", list)
    with pytest.raises(ValueError, match="a vocabulary has 257 to 65536 tokens, bpe20 would"):
        make_encoder("bpe20", list)
    with pytest.raises(ValueError, match="bpe5000 needs more text: it gives"):
        make_encoder("bpe5000", lambda: [b"a few words"])


def test_a_unigram_is_what_frequencies_predict(token_folder):
    folder = token_folder / "bytes"
    train, test = (open_split(folder, split) for split in ("train", "test"))
    counts = torch.bincount(train.read(0, len(train)), minlength=256) + 1
    nats = -(counts / counts.sum()).log()[test.read(0, len(test))].mean()
    assert read_manifest(folder)["splits"]["test"]["unigram_nats"] == pytest.approx(nats.item())


def damaged(books_folder, tmp_path, damage):
    prepare_tokens(books_folder, tmp_path, byte_encoder())
    damage(tmp_path / "bytes")
    return tmp_path / "bytes"


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda folder: (folder / MANIFEST).unlink(), "has no prepared tokens; make it anew: smat"),
        (lambda folder: (folder / MANIFEST).write_text("{"), "manifest.json is damaged"),
        (lambda folder: (folder / MANIFEST).write_text("{}"), "manifest.json is damaged"),
        (lambda folder: (folder / "test-0000.bin").unlink(), "test-0000.bin is missing; make it"),
        (lambda folder: (folder / "test-0000.bin").write_bytes(b"x"), "has 1 bytes, not"),
    ],
)
def test_damage_is_one_line(books_folder, tmp_path, damage, words):
    folder = damaged(books_folder, tmp_path, damage)
    with pytest.raises(ValueError, match=words):
        open_split(folder, "test")


def test_a_flipped_bit_is_found(books_folder, tmp_path):
    def flip(folder):
        content = bytearray((folder / "train-0000.bin").read_bytes())
        content[100] ^= 1
        (folder / "train-0000.bin").write_bytes(content)

    folder = damaged(books_folder, tmp_path, flip)
    with pytest.raises(ValueError, match=r"train-0000.bin is not what manifest.json"):
        check_hashes(folder)


def test_other_vocabularies_and_missing_folders_are_refused(token_folder, monkeypatch):
    with pytest.raises(ValueError, match="vocabulary of 300 tokens, but this run is for one of 9"):
        open_split(token_folder / "bpe300", "test", 9)
    monkeypatch.delenv("SMAT_DATA", raising=False)
    with pytest.raises(ValueError, match="--data or SMAT_DATA, and make one with: smat data prep"):
        data_folder("bytes")


def test_the_commands_prepare_and_check(books_folder, tmp_path, capsys):
    out = str(tmp_path)
    assert main(["data", "prepare", str(books_folder), "--out", out, "--tokens", "bytes"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"bytes, train: 3 of PG-19's 28,602 books, [\d,]+ bytes", printed)
    assert main(["data", "check", out]) == 0
    assert "4 files are as the manifest says" in capsys.readouterr().out
    assert main(["data", "prepare", str(tmp_path / "none"), "--out", out]) == 1
    assert capsys.readouterr().err.startswith("smat: error: no PG-19 in ")
    assert main(["data", "check", str(books_folder)]) == 1
    assert capsys.readouterr().err.count("\n") == 1
