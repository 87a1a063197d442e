"""Products of gates: all their digits, for any mixture, from fp64 down to fp32."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from smat.ops.linear.decay import ChunkDecay, LogDecay

GATES = st.one_of(
    st.just(0.0),
    st.just(-math.inf),
    st.just(-1e4),
    st.floats(-6, 4).map(lambda exponent: -(10**exponent)),
    st.floats(-6, 0).map(lambda exponent: -(10**exponent)),
)


def product(gates, earlier, later):
    """Multiply gates earlier + 1 .. later: the sum of their logarithms, rounded once."""
    return math.exp(math.fsum(gates[earlier:later]))


def triangle(gates, dtype):
    """Multiply the gates between all numbers of tokens, as edges of chunks and inside a chunk."""
    decay = LogDecay.of(gates.view(1, 1, -1))
    length = gates.numel()
    edges = ChunkDecay.of(decay, 0, length, 1, dtype).between[0, 0]
    inside = ChunkDecay.of(decay, 0, length, length, dtype).inside[0, 0, 0]
    return decay, edges, inside


@given(gates=st.lists(GATES, min_size=1, max_size=40))
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 5e-13), (torch.float32, 1e-5)])
def test_products_have_all_digits(gates, dtype, tolerance):
    decay, edges, inside = triangle(torch.tensor(gates, dtype=torch.float64), dtype)
    pairs = torch.tril_indices(len(edges), len(edges))
    between = decay.between(pairs[0], pairs[1], dtype)[0, 0]
    assert edges.dtype == inside.dtype == between.dtype == dtype
    assert not edges.triu(1).any()
    assert not inside.triu(1).any()
    for (later, earlier), value in zip(pairs.T.tolist(), between.tolist(), strict=True):
        expected = product(gates, earlier, later)
        # Below the smallest normal number there are fewer digits to have.
        room = max(tolerance * expected, torch.finfo(dtype).tiny)
        assert abs(value - expected) <= room
        assert abs(edges[later, earlier].item() - expected) <= room
        if earlier:
            assert abs(inside[later - 1, earlier - 1].item() - expected) <= room


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_small_gates_survive_many_large_ones(dtype):
    """After a hundred thousand resets the running sum is large, and its differences are not."""
    gates = torch.full((1, 100_000), -1e4, dtype=torch.float64)
    gates[0, -64:] = -1e-6
    decay = LogDecay.of(gates.unsqueeze(0))
    table = ChunkDecay.of(decay, 100_000 - 64, 100_000, 1, dtype).between[0, 0].double()
    expected = torch.exp(-1e-6 * (torch.arange(65)[:, None] - torch.arange(65)).double()).tril()
    # What matters is 1 - decay: six digits of 1e-6 in fp64.
    error = (table - expected).abs().max().item()
    assert error <= (1e-12 if dtype == torch.float64 else 1.2e-7)


def test_a_gate_of_minus_infinity_forgets():
    _, table, _ = triangle(torch.tensor([-0.5, -math.inf, -math.inf, -0.25]), torch.float64)
    assert torch.equal(table.diagonal(), torch.ones(5, dtype=torch.float64))
    assert not table[2:, :2].any()
    assert not table[3:, :3].any()
    assert table[4, 3].item() == pytest.approx(math.exp(-0.25), abs=1e-15)
