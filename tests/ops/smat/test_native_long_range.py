"""The native long range, forward and backward, against the dense oracle in fp64."""

import itertools

import pytest
import torch

import smat
from smat.ops.backend import available_backends
from smat.ops.native import arguments
from tests.ops.smat.comparison import (
    assert_close,
    attend,
    attend_densely,
    make_inputs,
    mild_gates,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore::smat.SMatWarning"),
    pytest.mark.skipif("native" not in available_backends(), reason="no C++ compiler"),
]
LENGTH = 90
SPACES = ((1, None), (2, 7), (3, 5), (4, 3), (5, 2))
BOUNDARIES = (None, smat.schedules.window(8), smat.schedules.doubling())


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"])
def threads(request, monkeypatch):
    """Work that is not worth a second thread is given one."""
    monkeypatch.setattr(arguments, "THREAD_WORK", 1)
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def draw(mask, kind, reads, **sizes):
    """Draw q, k, v, with gates, profiles and types as the kind says."""
    inputs = make_inputs(LENGTH, **sizes)
    dtype, generator = inputs["v"].dtype, torch.Generator().manual_seed(5)
    of_values, of_keys = inputs["v"].shape[:3], inputs["k"].shape[:3]
    of_answers = (*of_keys[:2], max(inputs["q"].shape[2], of_values[2]))

    def uniform(shape):
        return torch.rand(shape, generator=generator, dtype=torch.float64).to(dtype)

    if "gated" in kind:
        inputs["log_decay"] = mild_gates(of_values).to(dtype)
        inputs["key_gate"] = uniform(of_keys)
    if "routed" in kind:
        space = mask.geometry
        inputs["profile"] = torch.randint(space.num_profiles, of_values, generator=generator)
        several = (*of_answers, reads)
        inputs["query_type"] = torch.randint(space.num_types, several, generator=generator)
        inputs["read_weight"] = 0.1 + uniform(several)
        inputs["write_weight"] = uniform(of_values)
    return inputs


def check(inputs, mask, **options):
    expected = attend_densely(inputs, mask, **options)
    found = attend(inputs, mask, backend="native", **options)
    assert_close(found, expected, inputs["v"].dtype)


CASES = list(
    itertools.product(SPACES, BOUNDARIES, ("plain", "gated", "routed", "gated and routed"))
)


@pytest.mark.parametrize(("space", "boundary", "kind"), CASES[::2])
def test_equals_the_oracle(space, boundary, kind, threads):
    mask = smat.SMatMask(LENGTH, space[0], 8, space[1], boundary=boundary)
    number = CASES.index((space, boundary, kind))
    inputs = draw(
        mask, kind, reads=1 + number % 3, group=1 + number // 2 % 2,
        sharing=("queries", "values")[number // 4 % 2], key_dim=(5, 18)[number % 5 % 2],
        value_dim=(3, 33)[number // 3 % 2],
        dtype=(torch.float64, torch.float32)[number // 2 % 3 == 0],
    )  # fmt: skip
    scope = ("all", "recurrent")[number // 8 % 2]
    check(inputs, mask, normalize=number % 7 != 0, decay_scope=scope)


@pytest.mark.parametrize("branch", ["long_range", "both"])
@pytest.mark.parametrize("feature_map", ["relu", "elu"])
def test_one_branch_and_other_features(branch, feature_map, threads):
    mask = smat.SMatMask(LENGTH, 3, 8, 5)
    inputs = draw(mask, "gated", reads=1, key_dim=17, value_dim=20)
    check(inputs, mask, branch=branch, feature_map=feature_map)


def test_packed_sequences(threads):
    mask = smat.SMatMask(LENGTH, 3, 8)
    inputs = draw(mask, "gated", reads=1, batch=1)
    check(inputs, mask, cu_seqlens=torch.tensor([0, 40, 41, LENGTH]))


def test_the_same_call_gives_the_same_bits(threads):
    mask = smat.SMatMask(LENGTH, 4, 8, 3)
    inputs = draw(mask, "gated and routed", reads=2, dtype=torch.float32, value_dim=33)
    first, second = (attend(inputs, mask, backend="native") for _ in range(2))
    assert torch.equal(first[0], second[0])
    assert all(torch.equal(grad, second[1][name]) for name, grad in first[1].items())


def test_rows_with_gaps_and_half_precision(threads):
    mask = smat.SMatMask(LENGTH, 3, 8, 5)
    inputs = draw(mask, "plain", reads=1, heads=3, group=1, key_dim=16, value_dim=16)
    strided = {name: x.mT.contiguous().mT for name, x in inputs.items()}
    check(strided, mask)
    check({name: x.bfloat16() for name, x in inputs.items()}, mask)


@pytest.mark.parametrize("space", SPACES[1:4])
def test_one_head_is_shared_by_the_threads(space, threads):
    mask = smat.SMatMask(LENGTH, space[0], 8, space[1], boundary=BOUNDARIES[1])
    sizes = {"batch": 1, "heads": 1, "group": 2, "sharing": "values", "value_dim": 33}
    check(draw(mask, "gated and routed", reads=2, **sizes), mask)
