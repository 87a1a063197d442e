"""A few rows written out: the rows of the dense oracle, with every gradient."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import smat
from smat.ops import smat_attention_at
from smat.ops.smat import at_rows as few_rows
from tests.ops.smat.comparison import (
    assert_close,
    gradients,
    leaves,
    make_inputs,
    mild_gates,
    mixed_gates,
)

pytestmark = pytest.mark.filterwarnings("ignore::smat.SMatWarning")
PER_QUERY = ("q", "query_type", "read_weight")
BOUNDARIES = {
    "fixed": None,
    "none": smat.schedules.none(),
    "kept": None,
    "doubling": smat.schedules.doubling(),
    "window": smat.schedules.window(8),
}


def draw_case(
    seq_len, vc_dim, group, seed, gated, routed, boundary, num_reads=0, sharing="queries"
):
    schedule = smat.schedules.kept(seq_len // 3) if boundary == "kept" else BOUNDARIES[boundary]
    mask = smat.SMatMask(seq_len, vc_dim, 4, 3, schedule)
    inputs = make_inputs(seq_len, group=group, seed=seed, sharing=sharing)
    shape, generator = (2, seq_len, 2), torch.Generator().manual_seed(seed)
    if gated != "no":
        inputs["log_decay"] = (mild_gates if gated == "mild" else mixed_gates)(shape, seed)
        inputs["key_gate"] = torch.rand(shape, generator=generator).double()
    if routed:
        profiles, types = mask.geometry.num_profiles, mask.geometry.num_types
        heads = 2 * group
        inputs["profile"] = torch.randint(profiles, shape, generator=generator)
        shape_of_reads = (2, seq_len, heads, num_reads) if num_reads else (2, seq_len, heads)
        inputs["query_type"] = torch.randint(types, shape_of_reads, generator=generator)
        if num_reads:
            inputs["read_weight"] = torch.rand(shape_of_reads, generator=generator).double()
        inputs["write_weight"] = 0.5 + torch.rand(shape, generator=generator).double()
    return mask, inputs


@settings(max_examples=40, deadline=None)
@given(
    seq_len=st.integers(1, 40),
    vc_dim=st.integers(1, 4),
    group=st.integers(1, 2),
    seed=st.integers(0, 99),
    gated=st.sampled_from(["no", "mild", "mixed"]),
    routed=st.booleans(),
    num_reads=st.integers(0, 3),
    boundary=st.sampled_from(sorted(BOUNDARIES)),
    normalize=st.booleans(),
    branch=st.sampled_from(["both", "causal", "long_range"]),
    feature_map=st.sampled_from(["elu", "identity"]),
    sharing=st.sampled_from(["queries", "values"]),
)
def test_rows_are_those_of_the_oracle(
    seq_len,
    vc_dim,
    group,
    seed,
    gated,
    routed,
    num_reads,
    boundary,
    normalize,
    branch,
    feature_map,
    sharing,
):
    mask, inputs = draw_case(
        seq_len, vc_dim, group, seed, gated, routed, boundary, num_reads, sharing
    )
    options = {"normalize": normalize and feature_map == "elu", "branch": branch}
    rows = torch.randint(seq_len, (5,), generator=torch.Generator().manual_seed(seed))
    own = leaves(inputs)
    at_rows = {name: own[name][:, rows] for name in PER_QUERY if name in own}
    assert few_rows.is_few(at_rows["q"], own["k"])
    out = smat_attention_at(
        mask=mask, positions=rows, feature_map=feature_map, **(own | at_rows), **options
    )
    true = leaves(inputs)
    dense = smat.reference_attention(mask=mask, feature_map=feature_map, **true, **options)
    expected = dense[:, rows]
    found = out.detach(), gradients(out, own)
    assert_close(found, (expected.detach(), gradients(expected, true)), torch.float64)


def test_many_rows_are_read_from_tables(monkeypatch):
    mask, inputs = draw_case(33, 3, 1, 0, "mild", True, "fixed")
    rows = torch.tensor([32, 4, 20])
    at_rows = {name: inputs[name][:, rows] for name in PER_QUERY if name in inputs}
    few = smat_attention_at(mask=mask, positions=rows, **(inputs | at_rows))
    monkeypatch.setattr(few_rows, "MAX_ROWS", 2)
    many = smat_attention_at(mask=mask, positions=rows, **(inputs | at_rows))
    torch.testing.assert_close(few, many, rtol=1e-12, atol=1e-12)
