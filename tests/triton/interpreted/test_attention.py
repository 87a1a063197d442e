"""The whole op in Triton's interpreter, in poisoned memory, against the torch backend."""

import logging
from unittest import mock

import pytest
import torch

import smat
from smat.ops import backend
from smat.ops.linear import plan
from smat.ops.smat.operator import attend as operator
from smat.ops.triton import launch
from tests.ops.smat.comparison import (
    assert_close,
    attend,
    attend_densely,
    leaves,
    make_inputs,
    mild_gates,
    mixed_gates,
)

pytestmark = pytest.mark.filterwarnings("ignore::smat.SMatWarning")
FIXED = smat.SMatMask(96, 3, 8, field_size=3)
EVERY = (None, smat.schedules.none(), smat.schedules.window(6), smat.schedules.doubling())


@pytest.fixture(autouse=True)
def _short_chunks():
    """Let short sequences have many chunks, and few tiles be as large as on a GPU."""
    with mock.patch.object(plan, "CHUNK", 32):
        yield


def assert_same(inputs, mask, **options):
    """Compare the output and every gradient with those of the torch backend."""
    expected = attend(inputs, mask, backend="torch", **options)
    found = attend(inputs, mask, backend="triton", **options)
    assert_close(found, expected, inputs["v"].dtype)


def gated(seq_len, gates=mild_gates, **sizes):
    inputs = make_inputs(seq_len, **{"batch": 1, "dtype": torch.float32, **sizes})
    generator = torch.Generator().manual_seed(5)
    key_gate = torch.rand(inputs["k"].shape[:3], generator=generator)
    return inputs | {"log_decay": gates(inputs["v"].shape[:3]).float(), "key_gate": key_gate}


@pytest.mark.parametrize("seq_len", [1, 17, 47])
def test_plain(seq_len):
    inputs = make_inputs(seq_len, batch=1, key_dim=5, dtype=torch.float32)
    assert_same(inputs, smat.SMatMask(seq_len, 2, 8))


def test_gates_and_strides():
    inputs = gated(40, mixed_gates, key_dim=6)
    inputs = {name: x.transpose(1, 2).contiguous().transpose(1, 2) for name, x in inputs.items()}
    assert_same(inputs, smat.SMatMask(48, 3, 8, field_size=2))


def test_overlapping_windows():
    assert_same(gated(30), smat.SMatMask(30, 2, 4, boundary=smat.schedules.window(6)))


@pytest.mark.parametrize("sharing", ["queries", "values"])
def test_heads_that_share_keys(sharing):
    assert_same(gated(20, heads=1, group=2, sharing=sharing), smat.SMatMask(24, 2, 4))


def test_half_precision():
    inputs = make_inputs(40, batch=1, heads=1, key_dim=16, dtype=torch.float16)
    assert_same(inputs, smat.SMatMask(48, 3, 8, field_size=2))


@pytest.mark.parametrize("branch", ["causal", "long_range"])
def test_one_branch_without_the_division(branch):
    inputs = gated(34, heads=1)
    options = {"branch": branch, "normalize": False, "decay_scope": "recurrent"}
    assert_same(inputs, smat.SMatMask(40, 2, 8), feature_map="relu", **options)


def test_packing():
    edges = torch.tensor([0, 19, 19, 20, 44])
    assert_same(gated(44, heads=1), smat.SMatMask(48, 2, 8), cu_seqlens=edges)


def test_padding():
    inputs = make_inputs(33, heads=1, dtype=torch.float32)
    real = torch.arange(33).expand(2, -1) >= torch.tensor([[0], [9]])
    assert_same(inputs, smat.SMatMask(33, 2, 8), attention_mask=real)


def test_a_few_positions():
    inputs = make_inputs(40, batch=1, heads=1, dtype=torch.float32)
    assert_same(inputs, smat.SMatMask(40, 2, 8), positions=torch.tensor([39, 3, 3, 20]))


def test_a_query_that_sees_nothing_gives_zero():
    inputs = make_inputs(20, batch=1, dtype=torch.float32)
    inputs["k"] = -inputs["k"].abs()
    out, grads = attend(inputs, smat.SMatMask(20, 1, 8), feature_map="relu", backend="triton")
    assert not out.any()
    assert not grads["v"].any()


def test_launches_in_parts():
    inputs, mask = gated(20, heads=1), smat.SMatMask(24, 2, 4)
    expected, grads = attend(inputs, mask, backend="triton")
    with mock.patch.object(launch, "MOST_BLOCKS", 3):
        found, parts = attend(inputs, mask, backend="triton")
    assert torch.equal(found, expected)
    assert all(torch.equal(parts[name], grad) for name, grad in grads.items())


def test_fp64_goes_to_torch_and_says_so(caplog):
    backend.say_once.cache_clear()
    inputs, mask = make_inputs(20), smat.SMatMask(24, 2, 4)
    with caplog.at_level(logging.INFO, "smat"):
        found = attend(inputs, mask, backend="triton")
    assert "'torch' backend instead of 'triton'" in caplog.text
    assert_close(found, attend_densely(inputs, mask), torch.float64)


def test_a_cpu_keeps_its_own_kernels_unless_it_is_asked():
    assert backend.choose_backend("auto", torch.device("cpu")).name in ("native", "torch")
    assert backend.choose_backend("triton", torch.device("cpu")).name == "triton"


def test_the_operator_keeps_its_promises():
    own = leaves(gated(18, heads=1))
    tensors = [own[name] for name in ("q", "k", "v", "log_decay", "key_gate")] + [None] * 6
    mask = smat.SMatMask(24, 2, 4)
    torch.library.opcheck(
        operator, (tensors, mask.recipe, "elu", True, "both", "all", "triton"),
        test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("seq_len", [31, 64, 75, 96])
@pytest.mark.parametrize("boundary", EVERY, ids=str)
@pytest.mark.parametrize("vc_dim", [1, 2, 3, 4])
def test_masks_and_lengths(vc_dim, boundary, seq_len):
    mask = smat.SMatMask(96, vc_dim, 8, field_size=None if vc_dim < 3 else 2, boundary=boundary)
    assert_same(gated(seq_len, mixed_gates, key_dim=20, value_dim=18), mask)


@pytest.mark.slow
@pytest.mark.parametrize("strength", [0.0, 1e-6, 1.0, 50.0])
@pytest.mark.parametrize("decay_scope", ["all", "recurrent"])
@pytest.mark.parametrize("normalize", [True, False])
def test_gates_of_every_strength(strength, decay_scope, normalize):
    def gates(shape):
        return mild_gates(shape, strength=strength)

    options = {"decay_scope": decay_scope, "normalize": normalize}
    assert_same(gated(75, gates), FIXED, feature_map="elu" if normalize else "identity", **options)


def test_no_feature_map_under_a_normaliser():
    inputs = gated(75, mild_gates)
    inputs |= {name: inputs[name].abs() + 0.1 for name in ("q", "k")}  # else it may vanish
    assert_same(inputs, FIXED, feature_map="identity")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("reads", [None, 1, 4])
@pytest.mark.parametrize("sharing", ["queries", "values"])
def test_routing_by_content(sharing, reads, dtype):
    inputs = gated(75, group=2, sharing=sharing, key_dim=16)
    generator = torch.Generator().manual_seed(7)
    answers = (*inputs["q"].shape[:2], 4, *([] if reads is None else [reads]))
    values = inputs["v"].shape[:3]
    inputs |= {
        "profile": torch.randint(9, values, generator=generator),
        "query_type": torch.randint(12, answers, generator=generator),
        "write_weight": torch.rand(values, generator=generator),
    }
    if reads is not None:
        inputs["read_weight"] = torch.rand(answers, generator=generator)
    inputs = {name: x.to(dtype) if x.is_floating_point() else x for name, x in inputs.items()}
    assert_same(inputs, FIXED)


@pytest.mark.slow
@pytest.mark.parametrize(("key_dim", "value_dim"), [(64, 64), (40, 130), (128, 33)])
def test_several_tiles(key_dim, value_dim):
    assert_same(gated(75, heads=1, key_dim=key_dim, value_dim=value_dim), FIXED)
