"""Queries that read several types each: against single reads, differences, and the decoder."""

import pytest
import torch

import smat
from smat.ops import smat_attention_at
from smat.ops.smat.groups import SortedGroups
from smat.ops.smat.operator import attend as operator
from tests.ops.smat.comparison import (
    assert_matches_oracle,
    attend,
    leaves,
    make_inputs,
    mild_gates,
    poisoned_memory,
    relative_rms,
    small_blocks,
)
from tests.ops.smat.decoding import decode, empty_for, prefill, span, worst_row

pytestmark = pytest.mark.filterwarnings("ignore::smat.SMatWarning")
SCHEDULES = [None, smat.schedules.window(9), smat.schedules.doubling(), smat.schedules.kept(30)]


def with_reads(mask, seq_len, num_reads=3, group=2, **options):
    """Draw inputs with gates, profiles and several weighted reads a query."""
    inputs = make_inputs(seq_len, group=group, **options)
    generator = torch.Generator().manual_seed(5)
    keys, queries = inputs["k"].shape[:3], (*inputs["q"].shape[:3], num_reads)
    inputs["log_decay"] = mild_gates(keys)
    inputs["write_weight"] = torch.rand(keys, generator=generator, dtype=torch.float64)
    inputs["profile"] = torch.randint(mask.geometry.num_profiles, keys, generator=generator)
    inputs["query_type"] = torch.randint(mask.geometry.num_types, queries, generator=generator)
    inputs["read_weight"] = torch.rand(queries, generator=generator, dtype=torch.float64) - 0.3
    return inputs


@pytest.mark.parametrize("boundary", SCHEDULES, ids=str)
def test_reads_add_up(boundary):
    mask = smat.SMatMask(80, 3, 8, boundary=boundary)
    inputs = with_reads(mask, 80)
    types, weights = inputs.pop("query_type"), inputs.pop("read_weight")
    found, _ = smat.smat_attention(
        mask=mask, **inputs, query_type=types, read_weight=weights, normalize=False
    )
    expected, _ = smat.smat_attention(mask=mask, **inputs, normalize=False, branch="causal")
    for read in range(3):
        far, _ = smat.smat_attention(
            mask=mask, **inputs, query_type=types[..., read], normalize=False, branch="long_range"
        )
        expected = expected + weights[..., read, None] * far
    assert relative_rms(found, expected) <= 1e-12


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("boundary", SCHEDULES, ids=str)
@pytest.mark.parametrize("vc_dim", [1, 2, 4])
def test_equals_the_oracle_over_blocks_of_features(vc_dim, boundary, normalize):
    mask = smat.SMatMask(97, vc_dim, 8, field_size=3, boundary=boundary)
    inputs = with_reads(mask, 97)
    inputs["read_weight"] = inputs["read_weight"].abs()
    for positions in (None, torch.tensor([96, 3, 77, 77, 35])):
        with small_blocks(tile=4, tiles=2, tokens=200, table_bytes=1000):
            assert_matches_oracle(inputs, mask, normalize=normalize, positions=positions)


@pytest.mark.parametrize("boundary", [None, smat.schedules.window(3)], ids=str)
@pytest.mark.parametrize("normalize", [True, False])
def test_gradcheck(boundary, normalize):
    mask = smat.SMatMask(11, 3, 2, field_size=2, boundary=boundary)
    inputs = with_reads(mask, 11, 2, batch=1, heads=1, key_dim=2, value_dim=2)
    inputs["read_weight"] = inputs["read_weight"].abs() + 0.1
    own = leaves(inputs)
    names = [name for name, x in own.items() if x.requires_grad]
    rest = {name: x for name, x in own.items() if not x.requires_grad}

    def run(*values):
        named = dict(zip(names, values, strict=True))
        return smat.smat_attention(mask=mask, normalize=normalize, **named, **rest)[0]

    with small_blocks(tile=2, tiles=2, tokens=8, table_bytes=1):
        assert torch.autograd.gradcheck(run, tuple(own[name] for name in names))


@pytest.mark.parametrize(
    "boundary", [None, smat.schedules.window(16), smat.schedules.kept(30)], ids=str
)
@pytest.mark.parametrize("vc_dim", [1, 3])
def test_decoding_equals_prefill(vc_dim, boundary):
    mask = smat.SMatMask(90, vc_dim, 8, field_size=3, boundary=boundary)
    inputs = with_reads(mask, 90)
    inputs["read_weight"] = inputs["read_weight"].abs()
    whole = smat.reference_attention(mask=mask, **inputs)
    steps, _ = decode(empty_for(mask, inputs), inputs)
    assert worst_row(steps, whole) <= 1e-12
    for split in (5, 46, 80):
        _, state = prefill(span(inputs, 0, split), mask)
        assert worst_row(decode(state, inputs, split)[0], whole[:, split:]) <= 1e-12


def test_one_dimension_decodes_reads_without_a_write_weight():
    mask = smat.SMatMask(40, 1, 8)
    inputs = with_reads(mask, 40)
    del inputs["write_weight"]
    inputs["read_weight"] = inputs["read_weight"].abs()
    whole = smat.reference_attention(mask=mask, **inputs)
    _, state = prefill(span(inputs, 0, 30), mask)
    assert worst_row(decode(state, inputs, 30)[0], whole[:, 30:]) <= 1e-12
    with pytest.raises(ValueError, match="weighted=True"):
        decode(empty_for(mask, inputs), inputs)


def test_queries_at_positions_take_their_own_reads():
    mask = smat.SMatMask(80, 3, 8)
    inputs = with_reads(mask, 80)
    rows = torch.tensor([79, 41, 41, 3])
    whole, _ = attend(inputs, mask)
    inputs |= {name: inputs[name][:, rows] for name in ("q", "query_type", "read_weight")}
    found = smat_attention_at(mask=mask, positions=rows, **inputs)
    assert relative_rms(found, whole[:, rows]) <= 1e-12
    with pytest.raises(ValueError, match=r"the 3 positions, got q \(2, 4, 4, 4\)"):
        smat_attention_at(mask=mask, positions=rows[:3], **inputs)


def test_another_rows_nan_stays_there():
    mask = smat.SMatMask(80, 3, 8)
    inputs = with_reads(mask, 80)
    expected, grads = attend(inputs, mask)
    for name in ("q", "k", "v"):
        inputs[name][1] = torch.nan
    found, found_grads = attend(inputs, mask)
    assert torch.equal(found[0], expected[0])
    for name, grad in grads.items():
        assert torch.equal(found_grads[name][0], grad[0]), name


@pytest.mark.parametrize("num_tokens", [1, 40, 700])
@pytest.mark.parametrize("hot", [False, True])
def test_products_of_weighted_visits_equal_loops(num_tokens, hot):
    """Even visits take tiles in order; a group that most tokens name is cut into many."""
    generator = torch.Generator().manual_seed(0)
    shape = (2, num_tokens, 3)
    index = torch.randint(7, shape, generator=generator)
    if hot:
        index = torch.where(torch.rand(shape, generator=generator) < 0.8, 2, index)
    weight = torch.rand(shape, generator=generator, dtype=torch.float64)
    left, right, grad = (
        torch.randn(2, num_tokens, size, generator=generator, dtype=torch.float64)
        for size in (4, 3, 3)
    )
    table = torch.randn(2, 7, 4, 3, generator=generator, dtype=torch.float64)
    of_token = table[torch.arange(2)[:, None, None], index]  # (N, T, k, r, p)
    with poisoned_memory():
        groups = SortedGroups(index, 7, weight)
        found = groups.read(left, table), groups.read(right, table.mT)
        sums = groups.pool(left, right)
        more = groups.pool(left, right, onto=table.clone())
        grads = groups.read_backward(left, grad, table)
    torch.testing.assert_close(found[0], torch.einsum("ntr,ntkrp,ntk->ntp", left, of_token, weight))
    torch.testing.assert_close(
        found[1], torch.einsum("ntp,ntkrp,ntk->ntr", right, of_token, weight)
    )
    outer = torch.einsum("ntr,ntp,ntk->ntkrp", left, right, weight)
    expected = torch.zeros_like(table)
    for row in range(2):
        expected[row].index_add_(0, index[row].flatten(), outer[row].flatten(0, 1))
    torch.testing.assert_close(sums, expected)
    torch.testing.assert_close(more, expected + table)
    torch.testing.assert_close(grads[0], groups.read(grad, table.mT))
    torch.testing.assert_close(grads[1], torch.einsum("ntr,ntkrp,ntp->ntk", left, of_token, grad))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_operator_keeps_its_promises(dtype):
    mask = smat.SMatMask(24, 3, 8, field_size=3)
    inputs = with_reads(mask, 24)
    inputs["read_weight"] = inputs["read_weight"].abs()
    q, k, v, log_decay, write_weight, read_weight = (
        inputs[name].to(dtype).requires_grad_()
        for name in ("q", "k", "v", "log_decay", "write_weight", "read_weight")
    )
    torch.library.opcheck(
        operator,
        ([q, k, v, log_decay, None, write_weight, read_weight, inputs["profile"],
          inputs["query_type"], None, None], mask.recipe, "elu", True, "both", "all", "torch"),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query_type": None}, "query_type, which is missing"),
        (
            {"read_weight": torch.zeros(2, 20, 4, 2)},
            r"\(2, 20, 4, 3\) on cpu as query_type is, got",
        ),
        ({"read_weight": torch.zeros(2, 20, 4, 3).long()}, "floating-point, got torch.int64"),
        ({"query_type": torch.zeros(2, 20, 2, 3).long()}, r"\(2, 20, 4\), got \(2, 20, 2\)"),
        ({"query_type": torch.zeros(2, 20, 4, 0).long()}, r"at least one type, got \(2, 20, 4, 0"),
        ({"query_type": torch.full((2, 20, 4, 3), 12)}, r"\[0, 12\).* from 12 to 12"),
    ],
)
def test_bad_reads_are_refused_with_their_numbers(change, message):
    mask = smat.SMatMask(20, 3, 4, field_size=3)
    with pytest.raises(ValueError, match=message):
        smat.smat_attention(mask=mask, **(with_reads(mask, 20) | change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query_type": torch.full((2, 2, 4, 3), 12)}, r"\[0, 12\).* from 12 to 12"),
        ({"profile": torch.full((2, 20, 2), -1)}, r"\[0, 9\).* from -1 to -1"),
        ({"log_decay": torch.full((2, 20, 2), 0.5)}, r"at most 0, got 0\.5"),
    ],
)
def test_bad_values_are_refused_at_a_few_positions_too(change, message):
    mask = smat.SMatMask(20, 3, 4, field_size=3)
    inputs, rows = with_reads(mask, 20), torch.tensor([19, 3])
    inputs |= {name: inputs[name][:, rows] for name in ("q", "query_type", "read_weight")}
    with pytest.raises(ValueError, match=message):
        smat_attention_at(mask=mask, positions=rows, **(inputs | change))
