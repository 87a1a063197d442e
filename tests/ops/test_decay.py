"""Products of gates: all their digits, for any mixture, from fp64 down to fp32."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from smat.ops.decay import LogDecay, grad_log_decay

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


@given(gates=st.lists(GATES, min_size=1, max_size=40))
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 5e-13), (torch.float32, 1e-5)])
def test_triangle_has_all_digits(gates, dtype, tolerance):
    decay = LogDecay(torch.tensor([gates], dtype=torch.float64))
    counts = torch.arange(len(gates) + 1)
    table = decay.triangle(counts, dtype)[0]
    pairs = torch.tril_indices(len(counts), len(counts))
    between = decay.between(pairs[0], pairs[1], dtype)[0]
    assert table.dtype == between.dtype == dtype
    assert not table.triu(1).any()
    for (later, earlier), value in zip(pairs.T.tolist(), between.tolist(), strict=True):
        expected = product(gates, earlier, later)
        # Below the smallest normal number there are fewer digits to have.
        room = max(tolerance * expected, torch.finfo(dtype).tiny)
        assert abs(value - expected) <= room
        assert abs(table[later, earlier].item() - expected) <= room


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_small_gates_survive_many_large_ones(dtype):
    """After a hundred thousand resets the running sum is large, and its differences are not."""
    gates = torch.full((1, 100_000), -1e4, dtype=torch.float64)
    gates[0, -64:] = -1e-6
    decay = LogDecay(gates)
    counts = torch.arange(100_000 - 64, 100_001)
    table = decay.triangle(counts, dtype)[0].double()
    expected = torch.exp(-1e-6 * (torch.arange(65)[:, None] - torch.arange(65)).double()).tril()
    # What matters is 1 - decay: six digits of 1e-6 in fp64.
    error = (table - expected).abs().max().item()
    assert error <= (1e-12 if dtype == torch.float64 else 1.2e-7)


def test_a_gate_of_minus_infinity_forgets():
    decay = LogDecay(torch.tensor([[-0.5, -math.inf, -math.inf, -0.25]]))
    table = decay.triangle(torch.arange(5), torch.float64)[0]
    assert torch.equal(table.diagonal(), torch.ones(5, dtype=torch.float64))
    assert not table[2:, :2].any()
    assert not table[3:, :3].any()
    assert table[4, 3].item() == pytest.approx(math.exp(-0.25), abs=1e-15)


def test_gradient_of_the_gates():
    """Differentiate sum_ij g_ij (phi_i . psi_j) exp(lambda_i - lambda_j) both ways."""
    generator = torch.Generator().manual_seed(0)
    phi, psi = torch.randn(2, 2, 7, 4, generator=generator, dtype=torch.float64)
    weight = torch.randn(2, 7, 7, generator=generator, dtype=torch.float64)
    log_decay = -torch.rand(2, 7, generator=generator, dtype=torch.float64)
    log_decay[0, 3] = -math.inf
    own = [x.requires_grad_() for x in (phi, psi, log_decay)]
    total = log_decay.clamp(min=-1000).cumsum(-1)
    seen = torch.ones(7, 7).tril() == 1
    between = (total[:, :, None] - total[:, None, :]).masked_fill(~seen, -math.inf).exp()
    scores = torch.einsum("nir,njr->nij", phi, psi) * between
    grad_phi, grad_psi, expected = torch.autograd.grad((scores * weight).sum(), own)
    moved = (phi * grad_phi).sum(-1) - (psi * grad_psi).sum(-1)
    found = grad_log_decay(moved, log_decay)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
