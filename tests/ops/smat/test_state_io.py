"""A saved state goes on in another process, bit by bit, and only under its own mask."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import smat
from smat.ops.smat.state_io import checksum
from tests.ops.smat.decoding import decode, empty_for, make_case, prefill, span
from tests.ops.smat.interrupted_decoding import KILLED_AT, STOP, go_on, start

pytestmark = pytest.mark.filterwarnings("ignore::smat.SMatWarning")

ROOT = Path(__file__).parents[3]


def run(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "tests.ops.smat.interrupted_decoding", *map(str, arguments)],
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def test_after_the_process_is_killed_the_next_100_steps_are_bit_equal(tmp_path):
    path, out_path = tmp_path / "state.safetensors", tmp_path / "out.pt"
    killed = run("save", path)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert list(tmp_path.iterdir()) == [path]
    loaded = run("load", path, out_path)
    assert loaded.returncode == 0, loaded.stderr
    expected, _ = go_on(start(), 0, STOP)
    assert torch.equal(torch.load(out_path), expected[:, KILLED_AT:])


@pytest.mark.parametrize(
    "boundary",
    [None, smat.schedules.none(), smat.schedules.doubling(), smat.schedules.window(16)],
    ids=str,
)
@pytest.mark.parametrize("split", [0, 20, 48, 70])
def test_saving_and_loading_changes_nothing(boundary, split, tmp_path):
    mask = smat.SMatMask(97, 3, 8, boundary=boundary)
    inputs = make_case(mask, 97, "gated and routed")
    state = empty_for(mask, inputs)
    if split:
        _, state = decode(state, inputs, 0, split)
    state.save(tmp_path / "state")
    loaded = smat.SMatState.load(tmp_path / "state")
    assert loaded.mask == mask
    assert (loaded.positions, loaded.built) == (state.positions, state.built)
    assert torch.equal(decode(loaded, inputs, split)[0], decode(state, inputs, split)[0])


def test_rows_keep_their_positions(tmp_path):
    mask = smat.SMatMask(97, 2, 8, boundary=smat.schedules.window(8))
    inputs = make_case(mask, 97, batch=3)
    real = torch.arange(60) < torch.tensor([[60], [35], [0]])
    _, state = prefill(span(inputs, 0, 60), mask, attention_mask=real)
    state.save(tmp_path / "state")
    loaded = smat.SMatState.load(tmp_path / "state", mask)
    assert loaded.positions == [60, 35, 0]
    assert torch.equal(decode(loaded, inputs, 60)[0], decode(state, inputs, 60)[0])


def saved(tmp_path, **options):
    mask = smat.SMatMask(97, 2, 8)
    inputs = make_case(mask, 60)
    _, state = prefill(inputs, mask, **options)
    state.save(tmp_path / "state")
    return mask, tmp_path / "state"


def test_a_file_of_another_mask_is_refused_with_both_descriptions(tmp_path):
    mask, path = saved(tmp_path)
    for other in (
        smat.SMatMask(97, 3, 8),
        smat.SMatMask(129, 2, 8),
        smat.SMatMask(97, 2, 8, field_size=11),
        smat.SMatMask(97, 2, 8, boundary=smat.schedules.window(16)),
    ):
        with pytest.raises(ValueError, match="belongs to") as error:
            smat.SMatState.load(path, other)
        assert mask.describe() in str(error.value)
        assert other.describe() in str(error.value)
    same = smat.SMatMask(97, 2, 8, field_size=mask.geometry.field_size)
    assert smat.SMatState.load(path, same).positions == [60, 60]


def test_a_feature_map_of_ones_own_must_be_given_again(tmp_path):
    def shifted(x):
        return x.relu() + 0.5

    _, path = saved(tmp_path, feature_map=shifted)
    with pytest.raises(ValueError, match="pass feature_map"):
        smat.SMatState.load(path)
    assert smat.SMatState.load(path, feature_map=shifted).feature_map is shifted
    _, path = saved(tmp_path, feature_map="relu")
    assert smat.SMatState.load(path).feature_map == "relu"
    with pytest.raises(ValueError, match="'relu', not 'elu'"):
        smat.SMatState.load(path, feature_map="elu")


def rewrite(path, change_tensors=None, **metadata):
    """Write a file again with something changed."""
    with safe_open(path, "pt") as file:
        about = file.metadata() | metadata
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if change_tensors is not None:
        change_tensors(tensors)
    about["checksum"] = checksum(about["state"], tensors)
    save_file(tensors, path, about)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop("type_table"), "type_table"),
        (lambda tensors: tensors.update(extra=torch.zeros(1)), "extra"),
        (lambda tensors: tensors.update(recent=tensors["recent"].half()), "torch.float16"),
        (
            lambda tensors: tensors.update(type_table=tensors["type_table"][:, :, :, 1:].clone()),
            r"type_table must be torch.float64 of shape \(1, 2, 2, 7, 4, 4\).*\(1, 2, 2, 6, 4, 4\)",
        ),
        (lambda tensors: tensors.update(type_table=tensors["type_table"].float()), "torch.float32"),
    ],
)
def test_a_damaged_file_is_refused(change, message, tmp_path):
    _, path = saved(tmp_path)
    rewrite(path, change)
    with pytest.raises(ValueError, match=message):
        smat.SMatState.load(path)


def test_files_of_another_kind_or_version_are_refused(tmp_path):
    _, path = saved(tmp_path)
    rewrite(path, version="99")
    with pytest.raises(ValueError, match=r"version 2, but it says 'smat.state' version 99"):
        smat.SMatState.load(path)
    save_file({"weight": torch.zeros(2)}, tmp_path / "other")
    with pytest.raises(ValueError, match="but it says None version None"):
        smat.SMatState.load(tmp_path / "other")


@pytest.mark.parametrize("seed", range(40))
def test_a_flipped_bit_or_a_cut_is_noticed(seed, tmp_path):
    _, path = saved(tmp_path)
    content = bytearray(path.read_bytes())
    random = torch.Generator().manual_seed(seed)
    place = int(torch.randint(8 * len(content), (1,), generator=random))
    content[place // 8] ^= 1 << place % 8
    path.write_bytes(bytes(content))
    with pytest.raises(ValueError, match="state"):
        smat.SMatState.load(path)
    content[place // 8] ^= 1 << place % 8
    path.write_bytes(bytes(content[: 1 + place // 8]))
    with pytest.raises(ValueError, match="state"):
        smat.SMatState.load(path)


def test_two_flipped_signs_do_not_make_up_for_each_other():
    tensors = {"recent": torch.randn(6, dtype=torch.float64)}
    for bit in (0, 31, 32, 62, 63):
        words = tensors["recent"].view(torch.int64).clone()
        words[1] ^= torch.tensor(1 << bit if bit < 63 else -(1 << 63))
        once = checksum("", {"recent": words})
        words[4] ^= torch.tensor(1 << bit if bit < 63 else -(1 << 63))
        twice = checksum("", {"recent": words})
        assert len({checksum("", tensors), once, twice}) == 3, bit


@pytest.mark.parametrize("offset", [0, 30, 200, 500, 900])
def test_a_flipped_bit_of_the_description_is_noticed(offset, tmp_path):
    _, path = saved(tmp_path)
    for bit in range(8):
        content = bytearray(path.read_bytes())
        content[offset] ^= 1 << bit
        path.write_bytes(bytes(content))
        with pytest.raises(ValueError, match="state"):
            smat.SMatState.load(path)
        content[offset] ^= 1 << bit
        path.write_bytes(bytes(content))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"positions": [10**9, 3]}, None),
        ({"positions": [2**61, 3]}, "positions"),
        ({"positions": [-1, 3]}, "positions"),
        ({"positions": [3]}, "positions"),
        ({"positions": [3.0, 3]}, "positions"),
        ({"built": [-1, 0]}, "built"),
        ({"built": [10**6, 0]}, "slabs"),
        ({"spec": {"heads": 0}}, "no complete state|heads"),
        ({"mask": None}, "no complete state"),
    ],
)
def test_numbers_that_no_state_has_are_refused(change, message, tmp_path):
    mask = smat.SMatMask(97, 2, 8, boundary=smat.schedules.window(8))
    _, state = prefill(make_case(mask, 60), mask)
    path = tmp_path / "state"
    state.save(path)
    with safe_open(path, "pt") as file:
        about = json.loads(file.metadata()["state"])
    rewrite(path, state=json.dumps(about | change))
    if message is None:  # far along, but not wrong: it must answer at once
        far = smat.SMatState.load(path)
        assert far.positions == [10**9, 3]
        return
    with pytest.raises(ValueError, match=message):
        smat.SMatState.load(path)


def test_a_description_with_a_part_missing_is_refused(tmp_path):
    _, path = saved(tmp_path)
    with safe_open(path, "pt") as file:
        about = json.loads(file.metadata()["state"])
    for name in about:
        rewrite(path, state=json.dumps({key: x for key, x in about.items() if key != name}))
        with pytest.raises(ValueError, match="no complete state"):
            smat.SMatState.load(path)
