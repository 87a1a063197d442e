"""Checkpoints are whole or not there, and damage is told in one line that names the file."""

import io
import os

import pytest
import torch
from torch import nn

from smat.training.checkpoint import (
    CURRENT,
    PREVIOUS,
    CheckpointError,
    load_checkpoint,
    load_weights,
    newest_step,
    remove_checkpoints,
    save_checkpoint,
    save_weights,
    sealed,
    write_atomically,
)


def state(step):
    return {"step": step, "model": {"weight": torch.full((64, 64), float(step))}}


def cut(path):
    path.write_bytes(path.read_bytes()[:-100])


def empty(path):
    path.write_bytes(b"")


def flip(path):
    """Change one bit in the middle of the weights, where nothing but a checksum sees it."""
    flip_bit(path, 4 * path.stat().st_size)


def flip_bit(path, place):
    content = bytearray(path.read_bytes())
    content[place // 8] ^= 1 << place % 8
    path.write_bytes(bytes(content))


def scribble(path):
    path.write_bytes(b"not a checkpoint" * 100)


DAMAGES = pytest.mark.parametrize("damage", [cut, empty, flip, scribble], ids=lambda f: f.__name__)


def test_the_newest_is_read_and_the_one_before_is_kept(tmp_path):
    assert load_checkpoint(tmp_path) == (None, None)
    for step in (1, 2, 3):
        save_checkpoint(tmp_path, state(step))
    found, note = load_checkpoint(tmp_path)
    assert (found["step"], note) == (3, None)
    assert newest_step(tmp_path) == 3
    (tmp_path / CURRENT).unlink()  # killed between the two renames
    found, note = load_checkpoint(tmp_path)
    assert (found["step"], note) == (2, None)


@DAMAGES
def test_a_damaged_checkpoint_falls_back_to_the_one_before_and_says_so(tmp_path, damage):
    for step in (1, 2):
        save_checkpoint(tmp_path, state(step))
    damage(tmp_path / CURRENT)
    found, note = load_checkpoint(tmp_path)
    assert found["step"] == newest_step(tmp_path) == 1
    torch.testing.assert_close(found["model"]["weight"], torch.ones(64, 64))
    assert f"checkpoint {tmp_path / CURRENT} is damaged (" in note
    assert note.endswith(f"going on from {PREVIOUS}, step 1")
    assert "\n" not in note


@DAMAGES
def test_with_none_whole_the_error_names_the_files_and_what_to_do(tmp_path, damage):
    for step in (1, 2):
        save_checkpoint(tmp_path, state(step))
    files = [tmp_path / CURRENT, tmp_path / PREVIOUS]
    for path in files:
        damage(path)
    with pytest.raises(CheckpointError) as raised:
        load_checkpoint(tmp_path)
    message = str(raised.value)
    assert "\n" not in message
    assert message.endswith(f"to start this run anew: rm {files[0]} {files[1]}")
    assert all(path.exists() for path in files)
    assert newest_step(tmp_path) is None
    remove_checkpoints(tmp_path)
    assert load_checkpoint(tmp_path) == (None, None)


def test_no_flipped_bit_of_any_byte_goes_unnoticed(tmp_path):
    """Names, sizes, padding and the checksum itself count as well as the weights."""
    for step in (1, 2):
        save_checkpoint(tmp_path, {"step": step, "model": {"weight": torch.full((4,), step)}})
    path = tmp_path / CURRENT
    whole = path.read_bytes()
    for byte in range(len(whole)):
        flip_bit(path, 8 * byte + byte % 8)
        state, note = load_checkpoint(tmp_path)
        assert (state["step"], "is damaged" in note) == (1, True), byte
        assert newest_step(tmp_path) == 1, byte
        path.write_bytes(whole)
    assert newest_step(tmp_path) == 2


def test_a_file_that_tells_of_no_step_is_no_checkpoint(tmp_path):
    for foreign in ({"epoch": 3}, {"step": "three"}, [3]):
        buffer = io.BytesIO()
        torch.save(foreign, buffer)
        (tmp_path / CURRENT).write_bytes(sealed(buffer.getvalue()))
        with pytest.raises(CheckpointError, match="it tells of no step"):
            load_checkpoint(tmp_path)
        assert newest_step(tmp_path) is None


@pytest.mark.parametrize("moment", [0, 1], ids=["before", "between"])
def test_a_kill_at_a_rename_loses_nothing(tmp_path, monkeypatch, moment):
    for step in (1, 2):
        save_checkpoint(tmp_path, state(step))
    real, calls = os.replace, []

    def killed(*paths):
        calls.append(paths)
        if len(calls) > moment:
            raise KeyboardInterrupt  # no handler of ours catches it, like a kill
        real(*paths)

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(tmp_path, state(3))
    monkeypatch.undo()
    assert load_checkpoint(tmp_path)[0]["step"] == 2
    save_checkpoint(tmp_path, state(4))
    assert load_checkpoint(tmp_path)[0]["step"] == 4


def test_an_error_at_writing_leaves_the_old_file_and_no_scrap(tmp_path, monkeypatch):
    path = tmp_path / "record.json"
    write_atomically(path, b"old")

    def refuse(_):
        raise PermissionError(13, "not allowed")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(PermissionError):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert [file.name for file in tmp_path.iterdir()] == ["record.json"]


def test_weights_keep_every_name_of_a_tied_tensor(tmp_path):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    save_weights(tmp_path, model.state_dict())
    other = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    other.load_state_dict(load_weights(tmp_path))
    for name, weight in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], weight)
