"""Bad input: a ValueError that repeats the caller's numbers."""

import re

import pytest
import torch

import smat
from tests.ops.smat.comparison import make_inputs

pytestmark = pytest.mark.filterwarnings("ignore::smat.SMatWarning")

T, HEADS = 40, 2
MASK = smat.SMatMask(T, 3, 8, field_size=3)  # 9 profiles, 12 types
GATES = ("log_decay", "key_gate", "write_weight")


def call(mask=MASK, **changed):
    tensors = make_inputs(T, heads=HEADS, dtype=torch.float32)
    return smat.smat_attention(mask=mask, **{**tensors, **changed})[0]


def complaint(*parts, mask=MASK, **changed):
    """Call with changed arguments, and find every part in the error."""
    with pytest.raises(ValueError, match=r".+") as raised:
        call(mask, **changed)
    for part in parts:
        assert part in str(raised.value), f"{part!r} not in {raised.value}"


def test_the_unchanged_call_is_fine():
    assert call().shape == (2, T, HEADS, 3)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_shapes_and_dtypes_of_q_k_v(name):
    complaint(name, "(2, 40, 2)", **{name: torch.zeros(2, T, HEADS)})
    complaint(name, "torch.int64", **{name: torch.zeros(2, T, HEADS, 4).long()})
    complaint("torch.float64", "torch.float32", **{name: torch.zeros(2, T, HEADS, 4).double()})
    complaint("(2, 39, 2, 4)", "(2, 40, 2, ", **{name: torch.zeros(2, 39, HEADS, 4)})
    complaint("(1, 40, 2, 4)", **{name: torch.zeros(1, T, HEADS, 4)})


def test_widths_and_heads():
    complaint("width", "5", "4", q=torch.zeros(2, T, HEADS, 5))
    complaint("multiple", "3", "2", q=torch.zeros(2, T, 3, 4))
    complaint("multiple", "1", "2", q=torch.zeros(2, T, 1, 4))
    complaint("heads", "(2, 40, 1, 3)", v=torch.zeros(2, T, 1, 3))
    none = torch.zeros(2, T, 0, 4)
    complaint("multiple", "0", k=none, v=none)
    complaint("multiple", "0", v=none)
    complaint("multiple", "3", "2", v=torch.zeros(2, T, 3, 4))
    several = {"q": torch.zeros(2, T, 4, 4), "v": torch.zeros(2, T, 6, 4)}
    complaint("either", "4 query heads", "6 value heads", "2 key heads", **several)


def test_lengths_past_the_horizon():
    short = smat.SMatMask(32, 3, 8, field_size=2)
    complaint("40", "32", "for_length(40)", mask=short)
    empty = torch.zeros(2, 0, HEADS, 4)
    complaint("at least one token", "0", q=empty, k=empty, v=empty)


@pytest.mark.parametrize("name", GATES)
def test_gates(name):
    complaint(name, "(2, 40, 2)", "(2, 40)", **{name: torch.zeros(2, T)})
    complaint(name, "(2, 39, 2)", **{name: torch.zeros(2, 39, HEADS)})
    complaint(name, "(2, 40, 1)", **{name: torch.zeros(2, T, 1)})  # nothing is broadcast
    complaint(name, "torch.int64", **{name: torch.zeros(2, T, HEADS).long()})


def test_a_gate_that_is_no_number_gives_no_number_and_no_error():
    """A training step with a loss scale that is too large must be skipped, not crash."""
    gates = torch.zeros(2, T, HEADS)
    gates[1, 3, 0] = torch.nan
    out = call(log_decay=gates)
    assert out[1, 3:, 0].isnan().all()
    assert out[0].isfinite().all()


@pytest.mark.parametrize("value", [0.25, float("inf")])
def test_log_decay_must_not_be_positive(value):
    gates = torch.zeros(2, T, HEADS)
    gates[1, 3, 0] = value
    complaint("log_decay", "at most 0", str(value), log_decay=gates)


@pytest.mark.parametrize(("name", "limit"), [("profile", 9), ("query_type", 12)])
def test_routing(name, limit):
    index = torch.zeros(2, T, HEADS).long()
    complaint(name, "integers", "torch.float32", **{name: index.float()})
    complaint(name, "integers", "torch.bool", **{name: index.bool()})
    complaint(name, "(2, 40, 2)", "(2, 40)", **{name: index[..., 0]})
    for value in (limit, -1):
        index[0, 7, 1] = value
        low, high = min(value, 0), max(value, 0)
        complaint(name, f"[0, {limit})", f"from {low} to {high}", "q = 3", **{name: index})
    index[0, 7, 1] = limit - 1
    assert call(**{name: index}).isfinite().all()


def test_types_are_asked_for_every_query_head():
    query = torch.zeros(2, T, 2 * HEADS, 4)
    complaint("query_type", "(2, 40, 4)", q=query, query_type=torch.zeros(2, T, HEADS).long())


@pytest.mark.parametrize("value", [40, -1])
def test_positions_out_of_range(value):
    at = torch.tensor([0, value])
    complaint("positions", "[0, 40)", f"from {min(0, value)} to {max(0, value)}", positions=at)


def test_positions_of_the_wrong_kind():
    complaint("positions", "(1, 2)", positions=torch.zeros(1, 2).long())
    complaint("positions", "torch.float32", positions=torch.zeros(2))
    complaint("positions", "torch.bool", positions=torch.ones(T).bool())


def test_padding():
    complaint("attention_mask", "(2, 40)", "(2, 39)", attention_mask=torch.ones(2, 39))
    complaint("attention_mask", "(2, 40)", "(40,)", attention_mask=torch.ones(T))


def test_packing():
    one = {name: x[:1] for name, x in make_inputs(T, dtype=torch.float32).items()}
    complaint("batch of 1", "2", cu_seqlens=torch.tensor([0, T]))
    for edges in ([0, 39], [1, 40], [0, 20, 10, 40], [0, 50, 40], [0, -3, 40]):
        complaint("from 0", "40", str(edges), cu_seqlens=torch.tensor(edges), **one)
    complaint("two integers", "(1,)", cu_seqlens=torch.tensor([0]), **one)
    complaint("two integers", "(1, 2)", cu_seqlens=torch.tensor([[0, T]]), **one)
    complaint("two integers", "torch.float32", cu_seqlens=torch.tensor([0.0, T]), **one)
    both = {"attention_mask": torch.ones(1, T), "cu_seqlens": torch.tensor([0, T])}
    complaint("pack or pad", **both, **one)


def test_packed_routing_is_checked_against_each_sequence():
    mask = smat.SMatMask(T, 3, 4)  # q = 3 at 40 tokens, and 2 at 20 and fewer
    assert mask.geometry.field_size == 3
    one = {name: x[:1] for name, x in make_inputs(T, dtype=torch.float32).items()}
    profile = torch.zeros(1, T, HEADS).long()
    profile[0, 35] = 4
    edges = torch.tensor([0, 30, T])
    one |= {"mask": mask, "cu_seqlens": edges}
    complaint("profile", "[0, 4)", "T = 10", "from 0 to 4", profile=profile, **one)
    types = torch.zeros(1, T, HEADS).long()
    types[0, 35] = 6
    complaint("query_type", "[0, 6)", "T = 10", "from 0 to 6", query_type=types, **one)


def test_names():
    complaint("feature_map", "elu", "'cosine'", feature_map="cosine")
    complaint("branch", "both", "'twig'", branch="twig")
    complaint("backend", "torch", "'abacus'", backend="abacus")


def test_errors_are_sentences():
    with pytest.raises(ValueError, match=re.escape("log_decay must be at most 0, got 1.0")):
        call(log_decay=torch.ones(2, T, HEADS))
