"""Padding and packing: each sequence gives what it would give alone."""

import itertools

import pytest
import torch

import smat
from smat.ops.smat.padding import Padding
from tests.ops.smat.comparison import (
    attend,
    gradients,
    leaves,
    make_inputs,
    mild_gates,
    poisoned_memory,
    relative_rms,
)

pytestmark = pytest.mark.filterwarnings("ignore::smat.SMatWarning")

SCHEDULES = [None, smat.schedules.kept(13), smat.schedules.doubling(), smat.schedules.window(8)]
# First and last real token of each row: left, right, both, none, all padding, one token.
SPANS = [(20, 50), (0, 37), (9, 41), (0, 50), (50, 50), (17, 18)]


def full_inputs(seq_len, batch, mask, content, sharing="queries"):
    """Draw every tensor that the op takes."""
    inputs = make_inputs(seq_len, batch=batch, group=2, sharing=sharing)
    generator = torch.Generator().manual_seed(5)
    shape = (batch, seq_len, 2)
    inputs["log_decay"] = mild_gates(shape)
    for name in ("key_gate", "write_weight"):
        inputs[name] = torch.rand(shape, generator=generator, dtype=torch.float64)
    if content:
        geometry = mask.geometry
        inputs["profile"] = torch.randint(geometry.num_profiles, shape, generator=generator)
        types = (batch, seq_len, 4)
        inputs["query_type"] = torch.randint(geometry.num_types, types, generator=generator)
    return inputs


def attention_mask():
    real = torch.zeros(len(SPANS), 50, dtype=torch.long)
    for row, (start, stop) in zip(real, SPANS, strict=True):
        row[start:stop] = 1
    return real


def assert_rows_alone(inputs, mask, feature_map="elu"):
    """Compare every padded row with its real tokens alone, outputs and gradients."""
    own, real = leaves(inputs), attention_mask()
    with poisoned_memory():
        out, _ = smat.smat_attention(mask=mask, attention_mask=real, feature_map=feature_map, **own)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(3)).to(out)
    names = [name for name, x in own.items() if x.requires_grad]
    grads = torch.autograd.grad(out, [own[name] for name in names], weight)
    assert not out[real == 0].any()
    for row, (start, stop) in enumerate(SPANS):
        for grad in grads:
            assert not grad[row, :start].any()
            assert not grad[row, stop:].any()
        if start == stop:
            continue
        alone = leaves({name: x[row : row + 1, start:stop] for name, x in inputs.items()})
        expected, _ = smat.smat_attention(mask=mask, feature_map=feature_map, **alone)
        assert relative_rms(out[row : row + 1, start:stop], expected) <= 1e-12
        expected_grads = torch.autograd.grad(
            expected, [alone[name] for name in names], weight[row : row + 1, start:stop]
        )
        least = 1e-3 * max(grad.abs().max().item() for grad in expected_grads)
        for name, grad, true in zip(names, grads, expected_grads, strict=True):
            error = relative_rms(grad[row : row + 1, start:stop], true, least)
            assert error <= 1e-10, name


@pytest.mark.parametrize("boundary", SCHEDULES, ids=str)
@pytest.mark.parametrize("content", [False, True])
@pytest.mark.parametrize("sharing", ["queries", "values"])
def test_padded_rows_equal_rows_alone(boundary, content, sharing):
    mask = smat.SMatMask(50, 3, 4, boundary=boundary)
    assert_rows_alone(full_inputs(50, len(SPANS), mask, content, sharing), mask)


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), 1e300])
@pytest.mark.parametrize("feature_map", ["elu", "favor", torch.nn.functional.softplus])
def test_what_padding_holds_is_never_seen(garbage, feature_map):
    mask = smat.SMatMask(50, 3, 4)
    inputs = full_inputs(50, len(SPANS), mask, content=True)
    hidden = attention_mask() == 0
    for x in inputs.values():
        x[hidden] = garbage if x.is_floating_point() else 10_000
    assert_rows_alone(inputs, mask, feature_map)


def test_padding_in_the_middle():
    mask, inputs = smat.SMatMask(50, 3, 4), make_inputs(50, batch=1)
    real = torch.rand(1, 50, generator=torch.Generator().manual_seed(0)) < 0.7
    out, _ = attend(inputs, mask, attention_mask=real)
    alone = {name: x[:, real[0]] for name, x in inputs.items()}
    assert relative_rms(out[:, real[0]], attend(alone, mask)[0]) <= 1e-12


@pytest.mark.parametrize("dtype", [torch.bool, torch.long, torch.float32], ids=str)
def test_every_token_real_is_no_padding(dtype):
    mask, inputs = smat.SMatMask(50, 3, 4), make_inputs(50)
    padded, _ = attend(inputs, mask, attention_mask=torch.ones(2, 50, dtype=dtype))
    assert relative_rms(padded, attend(inputs, mask)[0]) <= 1e-14


def test_positions_count_padding():
    mask, inputs = smat.SMatMask(50, 3, 4), make_inputs(50, batch=len(SPANS))
    rows = torch.tensor([49, 0, 20, 21, 20])
    whole, _ = attend(inputs, mask, attention_mask=attention_mask())
    some, _ = attend(inputs, mask, attention_mask=attention_mask(), positions=rows)
    assert torch.equal(some, whole[:, rows])


def test_restoring_undoes_moving_to_the_front():
    real = attention_mask()
    padding = Padding(real)
    x = torch.randn(len(SPANS), 50, 2, 3)
    assert torch.equal(padding.restore(padding.front(x)), x * real[..., None, None])
    assert padding.lengths.tolist() == [stop - start for start, stop in SPANS]


EDGES = [0, 0, 1, 14, 14, 14, 78, 120, 120]


@pytest.mark.parametrize("boundary", SCHEDULES, ids=str)
@pytest.mark.parametrize("at_positions", [False, True])
@pytest.mark.parametrize("sharing", ["queries", "values"])
def test_packed_sequences_equal_sequences_alone(boundary, at_positions, sharing):
    mask = smat.SMatMask(120, 3, 4, boundary=boundary)
    inputs = full_inputs(120, 1, mask, content=False, sharing=sharing)
    own = leaves(inputs)
    rows = torch.tensor([0, 119, 13, 14, 77, 80, 40]) if at_positions else torch.arange(120)
    with poisoned_memory():
        out, _ = smat.smat_attention(
            mask=mask, cu_seqlens=torch.tensor(EDGES), positions=rows, **own
        )
        grads = gradients(out, own)
    alone = leaves(inputs)
    pieces = [
        smat.smat_attention(
            mask=mask.for_length(stop - start),
            **{name: x[:, start:stop] for name, x in alone.items()},
        )[0]
        for start, stop in itertools.pairwise(EDGES)
        if stop > start
    ]
    expected = torch.cat(pieces, 1)[:, rows]
    assert relative_rms(out, expected) <= 1e-12
    for name, grad in gradients(expected, alone).items():
        assert relative_rms(grads[name], grad) <= 1e-10, name


def test_packed_content_follows_each_sequences_own_geometry():
    mask = smat.SMatMask(120, 3, 4)
    inputs = make_inputs(120, batch=1)
    routing = {"profile": [], "query_type": []}
    generator = torch.Generator().manual_seed(0)
    for start, stop in itertools.pairwise(EDGES):
        own = mask.for_length(max(1, stop - start)).geometry
        shape = (1, stop - start, 2)
        routing["profile"].append(torch.randint(own.num_profiles, shape, generator=generator))
        routing["query_type"].append(torch.randint(own.num_types, shape, generator=generator))
    inputs |= {name: torch.cat(parts, 1) for name, parts in routing.items()}
    out, _ = attend(inputs, mask, cu_seqlens=torch.tensor(EDGES, dtype=torch.int32))
    for start, stop in ((0, 1), (1, 14), (14, 78), (78, 120)):
        alone = {name: x[:, start:stop] for name, x in inputs.items()}
        expected, _ = attend(alone, mask.for_length(stop - start))
        assert relative_rms(out[:, start:stop], expected) <= 1e-12


def test_nothing_but_empty_sequences():
    empty = {name: torch.zeros(1, 0, 2, 4) for name in ("q", "k", "v")}
    out, _ = smat.smat_attention(
        mask=smat.SMatMask(64, 3, 4), cu_seqlens=torch.tensor([0, 0, 0]), **empty
    )
    assert out.shape == (1, 0, 2, 4)


def test_a_batch_of_none():
    empty = {name: torch.zeros(0, 20, 2, 4) for name in ("q", "k", "v")}
    out, _ = smat.smat_attention(mask=smat.SMatMask(64, 3, 4), **empty)
    assert out.shape == (0, 20, 2, 4)
