"""Files with flipped bits or cut off: states and checkpoints."""

import tempfile
from pathlib import Path

import torch

import smat
from smat.training.checkpoint import (
    CURRENT,
    PREVIOUS,
    load_checkpoint,
    newest_step,
    save_checkpoint,
)
from tests.fuzz.attention import DTYPES
from tests.fuzz.states import draw_sequence
from tests.ops.smat.decoding import prefill


def damage(choices, path, name=""):
    """Flip bits of a file, or cut it off; return whether that changed it."""
    whole = path.read_bytes()
    content = bytearray(whole)
    # Half of the damage hits the beginning, where a state has its description.
    size = len(content) if choices.pick(f"{name}anywhere", [True, False]) else 1000
    places = range(min(size, len(content)))
    if choices.pick(f"{name}damage", ["flip", "cut"]) == "cut":
        content = content[: choices.pick(f"{name}cut at", places)]
    else:
        for n in range(choices.pick(f"{name}flips", [1, 1, 2, 3])):
            bit = 1 << choices.pick(f"{name}bit {n}", range(8))
            content[choices.pick(f"{name}byte {n}", places)] ^= bit
    path.write_bytes(bytes(content))
    return content != whole


def attempted(load, path):
    """Load a file; return what it holds and nothing, or None and what was said."""
    try:
        return load(path), ""
    except ValueError as error:  # a CheckpointError is one
        return None, str(error)


def damaged(choices):
    """A damaged state is refused; a damaged checkpoint gives way to the one before, if whole."""
    with tempfile.TemporaryDirectory() as folder:
        if choices.pick("file", ["state", "checkpoint"]) == "state":
            damaged_state(choices, Path(folder) / "state")
        else:
            damaged_checkpoints(choices, Path(folder))


def damaged_state(choices, path):
    mask, inputs, options = draw_sequence(choices)
    with torch.no_grad():
        _, state = prefill(inputs, mask, **options)
    state.save(path)
    if not damage(choices, path):  # a bit was flipped twice
        return
    found, said = attempted(smat.SMatState.load, path)
    assert found is None, "a damaged file was loaded"
    assert "state" in said, said


def damaged_checkpoints(choices, folder):
    dtype = getattr(torch, choices.pick("dtype", DTYPES))
    size = choices.pick("size", [1, 10, 100, 3000])
    weights = {step: torch.rand(size).to(dtype) for step in (1, 2)}
    for step, weight in weights.items():
        save_checkpoint(folder, {"step": step, "model": {"weight": weight}})
    bad = {2} if damage(choices, folder / CURRENT) else set()
    if choices.pick("both", [False, True]) and damage(choices, folder / PREVIOUS, "previous "):
        bad.add(1)
    left = max({1, 2} - bad, default=None)
    assert newest_step(folder) == left
    found, said = attempted(load_checkpoint, folder)
    if left is None:
        assert all(name in said for name in (CURRENT, PREVIOUS)), said
        return
    state, note = found
    assert state["step"] == left
    assert note is None if left == 2 else CURRENT in note, note
    assert torch.equal(state["model"]["weight"], weights[left])
