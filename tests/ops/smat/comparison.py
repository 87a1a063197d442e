"""Hold the fast op against the dense oracle: output and every gradient, by name."""

from contextlib import ExitStack, contextmanager
from unittest import mock

import torch

import smat
from smat.geometry import radon
from smat.ops import smat_attention_at
from smat.ops.feature_maps import Favor
from smat.ops.linear import chunks
from smat.ops.smat import attention, groups, long_range

# Relative RMS of the output, and of every gradient.
TOLERANCE = {
    torch.float64: (1e-12, 1e-10),
    torch.float32: (1e-5, 1e-4),
    torch.bfloat16: (5e-3, 1e-2),
    torch.float16: (5e-3, 1e-2),
}
DIFFERENTIABLE = ("q", "k", "v", "log_decay", "key_gate", "write_weight", "read_weight")
READS = ("q", "query_type", "read_weight")  # what belongs to queries alone


def rms(x):
    return x.double().square().mean().sqrt().item() if x.numel() else 0.0


def relative_rms(found, expected, least=0.0):
    """Return the RMS of the difference over that of what is expected, or over `least` if larger.

    Nothing but 0 is close to 0, and NaN is close to nothing.
    """
    assert found.shape == expected.shape, f"{tuple(found.shape)} != {tuple(expected.shape)}"
    difference = rms(found.double() - expected.double())
    size = max(rms(expected), least)
    return difference / size if size > 0 else (0.0 if difference == 0 else float("inf"))


@contextmanager
def poisoned_memory():
    """Fill fresh memory with NaN: what is read before it is written shows."""
    before = torch.are_deterministic_algorithms_enabled()
    fill_before = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        assert torch.empty(1).isnan()
        assert torch.ones(1).new_empty(1).isnan()
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        torch.utils.deterministic.fill_uninitialized_memory = fill_before


@contextmanager
def small_blocks(tile=8, tiles=4, tokens=64, table_bytes=2000):
    """Shrink every block size of the op, so that short sequences take many chunks and slices."""
    sizes = (
        (chunks, "CHUNK", tile), (chunks, "CPU_TILES", tiles), (attention, "CPU_TOKENS", tokens),
        (long_range, "TABLE_BYTES", table_bytes), (radon, "SLAB_COLUMNS", (16, 16)),
        (radon, "WHOLE_ELEMENTS", 200), (radon, "STACK_ELEMENTS", 500),
        (groups, "SPARE_SLOTS", 2), (groups, "MAX_SLOTS", 40),
    )  # fmt: skip
    with ExitStack() as stack:
        for module, name, value in sizes:
            stack.enter_context(mock.patch.object(module, name, value))
        yield


def make_inputs(
    seq_len,
    *,
    batch=2,
    heads=2,
    group=1,
    key_dim=4,
    value_dim=3,
    dtype=torch.float64,
    seed=0,
    sharing="queries",
):
    """Draw q, k and v; `heads` counts key heads, `group` the heads that share each.

    Those are heads of queries, or heads of values, which then share a query too.
    """
    query_heads = heads * group if sharing == "queries" else heads
    value_heads = heads * group if sharing == "values" else heads
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    return {
        "q": normal(batch, seq_len, query_heads, key_dim),
        "k": normal(batch, seq_len, heads, key_dim),
        "v": normal(batch, seq_len, value_heads, value_dim),
    }


def mild_gates(shape, seed=1, strength=0.3):
    """Gates near 1, as trained models have them."""
    generator = torch.Generator().manual_seed(seed)
    return -strength * torch.rand(shape, generator=generator, dtype=torch.float64)


def mixed_gates(shape, seed=1):
    """Gates from -1e-6 to -1e4 side by side, some of them full resets."""
    generator = torch.Generator().manual_seed(seed)
    gates = -(10 ** (10 * torch.rand(shape, generator=generator, dtype=torch.float64) - 6))
    mild = torch.rand(shape, generator=generator) < 0.7
    gates = torch.where(mild, gates.clamp(min=-1), gates)
    return gates.masked_fill(torch.rand(shape, generator=generator) < 0.05, -torch.inf)


def leaves(inputs, dtype=None):
    """Copy tensors as leaves: floating-point ones ask for a gradient."""
    return {
        name: x.detach().to(dtype or x.dtype).requires_grad_() if name in DIFFERENTIABLE else x
        for name, x in inputs.items()
    }


def gradients(out, inputs, seed=3):
    """Differentiate a random weighting of the output by every differentiable input."""
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed))
    weight = weight.bfloat16().to(out.dtype)  # the same numbers in every dtype
    named = {name: x for name, x in inputs.items() if name in DIFFERENTIABLE}
    if not out.requires_grad:  # the oracle, where every token is padding
        return {name: torch.zeros_like(x) for name, x in named.items()}
    found = torch.autograd.grad(out, list(named.values()), weight, allow_unused=True)
    return {
        name: torch.zeros_like(x) if grad is None else grad
        for (name, x), grad in zip(named.items(), found, strict=True)
    }


def attend(inputs, mask, **options):
    """Run the op in poisoned memory; return its output and its gradients."""
    own = leaves(inputs)
    with poisoned_memory():
        out, _ = smat.smat_attention(mask=mask, **own, **options)
        return out.detach(), gradients(out, own)


def attend_at(inputs, mask, positions, **options):
    """Run the op at a few positions alone; its gradients are those of all the inputs."""
    own = leaves(inputs)
    few = {name: x[:, positions] if name in READS else x for name, x in own.items()}
    with poisoned_memory():
        out = smat_attention_at(mask=mask, positions=positions, **few, **options)
        return out.detach(), gradients(out, own)


def attend_densely(inputs, mask, feature_map="elu", **options):
    """Run the oracle in fp64 on the same numbers; return its output and its gradients.

    What a caller's own map makes of q and k is rounded to the dtype that it computes in. That is
    what the op is given, so the oracle has the same numbers, and the exact derivative.
    """
    own, dtype = leaves(inputs, torch.float64), inputs["q"].dtype

    def rounded(x):
        exact = feature_map(x)
        return exact + (feature_map(x.to(dtype)) - exact).detach()

    known = Favor() if feature_map == "favor" else feature_map
    features = rounded if callable(feature_map) else known
    out = smat.reference_attention(mask=mask, feature_map=features, **own, **options)
    return out.detach(), gradients(out, own)


def assert_close(found, expected, dtype):
    """Compare outputs and gradients at the tolerances of their dtype.

    A gradient that vanishes in exact arithmetic, as that of q does where a query sees one key, is
    measured against a thousandth of the largest one, or so that sixteen roundings of a sum as large
    as that one are within the tolerance: in fp32 a thousandth would leave less than one. Weights
    below the smallest normal number of the sums are 0, so nothing near it has its digits; nor has
    an output near the smallest number of its dtype.
    """
    (out, grads), (true_out, true_grads) = found, expected
    out_tolerance, grad_tolerance = TOLERANCE[dtype]
    own, sums = (torch.finfo(x) for x in (dtype, torch.promote_types(dtype, torch.float32)))
    assert out.dtype == dtype
    assert all(grad.dtype == dtype for grad in grads.values())
    share = max(1e-3, 16 * sums.eps / grad_tolerance)
    gone = max(sums.tiny / sums.eps, own.tiny * own.eps / out_tolerance)
    least = max(gone, *(share * rms(grad) for grad in true_grads.values()), 0.0)
    errors = {"out": relative_rms(out, true_out, gone)} | {
        name: relative_rms(grads[name], grad, least) for name, grad in true_grads.items()
    }
    limits = {name: out_tolerance if name == "out" else grad_tolerance for name in errors}
    wrong = {name: error for name, error in errors.items() if not error <= limits[name]}
    assert not wrong, f"relative RMS beyond {out_tolerance} / {grad_tolerance}: {wrong}"


def assert_matches_oracle(inputs, mask, **options):
    """Compare the op with the oracle: output and every gradient."""
    dtype = inputs["v"].dtype
    expected = attend_densely(inputs, mask, **options)
    assert_close(attend(inputs, mask, **options), expected, dtype)
