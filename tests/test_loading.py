"""No load runs code: every reader of the package refuses a pickle that would."""

import ast
import io
import os
import pickle
from pathlib import Path

import pytest
import torch

import smat
from smat.training.checkpoint import (
    CURRENT,
    PREVIOUS,
    WEIGHTS,
    CheckpointError,
    load_checkpoint,
    load_weights,
    newest_step,
    sealed,
)

ROOT = Path(__file__).parents[1]
SOURCES = sorted([*(ROOT / "smat").rglob("*.py"), *(ROOT / "tools").rglob("*.py")])
# Modules and functions that run what a file says.
RUNS_CODE = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
READS = {"load", "loads", "Unpickler", "open"}


def unsafe_loads(source):
    """List the lines that may unpickle: `torch.load` unless it reads weights only, and others."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            module, _, function = ast.unparse(node.func).rpartition(".")
            words = {word.arg: ast.unparse(word.value) for word in node.keywords}
            whole = words.get("weights_only", "False" if module == "torch" else "True") != "True"
            if (
                (function == "load" and whole)
                or (module in RUNS_CODE and function in READS)
                or words.get("allow_pickle", "False") != "False"
                or function == "read_pickle"
            ):
                found.append(node.lineno)
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_source_unpickles(path):
    assert unsafe_loads(path.read_text()) == []


@pytest.mark.parametrize(
    ("source", "is_unsafe"),
    [
        ("torch.load(path)", True),
        ("torch.load(path, weights_only=False)", True),
        ("load(path, weights_only=flag)", True),
        ("torch.load(path, weights_only=True, mmap=True)", False),
        ("pickle.loads(content)", True),
        ("numpy.load(path, allow_pickle=True)", True),
        ("pandas.read_pickle(path)", True),
        ("json.loads(content)", False),
        ("safetensors.torch.load(content)", False),
    ],
)
def test_the_search_finds_what_it_should(source, is_unsafe):
    assert unsafe_loads(source) == [1] * is_unsafe


class Evil:
    """A pickle that makes a folder when it is read."""

    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


def as_archive(content):
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def as_old_file(content):
    buffer = io.BytesIO()
    torch.save(content, buffer, _use_new_zipfile_serialization=False)
    return buffer.getvalue()


def as_pickle(content):
    return pickle.dumps(content, protocol=2)


each_pickle = pytest.mark.parametrize("write", [as_archive, as_old_file, as_pickle])


@each_pickle
def test_the_pickle_would_run(tmp_path, write):
    """Otherwise the tests below would show nothing."""
    content = io.BytesIO(write({"step": 1, "x": Evil(tmp_path / "evil")}))
    read = pickle.load if write is as_pickle else lambda f: torch.load(f, weights_only=False)
    read(content)
    assert (tmp_path / "evil").exists()


@each_pickle
@pytest.mark.parametrize("seal", [sealed, bytes], ids=["checksum", "no-checksum"])
def test_a_checkpoint_that_would_run_code_is_refused(tmp_path, write, seal):
    content = seal(write({"step": 1, "x": Evil(tmp_path / "evil")}))
    for name in (CURRENT, PREVIOUS):
        (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match="is damaged"):
        load_checkpoint(tmp_path)
    assert newest_step(tmp_path) is None
    assert not (tmp_path / "evil").exists()


@each_pickle
def test_weights_and_states_that_would_run_code_are_refused(tmp_path, write):
    path = tmp_path / WEIGHTS
    path.write_bytes(write({"weight": Evil(tmp_path / "evil")}))
    with pytest.raises(Exception, match=r"(?i)header"):
        load_weights(tmp_path)
    with pytest.raises(ValueError, match="no whole safetensors file"):
        smat.SMatState.load(path)
    assert not (tmp_path / "evil").exists()
