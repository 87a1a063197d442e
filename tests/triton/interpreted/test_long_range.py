"""The long range in Triton's interpreter against torch: outputs and every gradient."""

import pytest
import torch

import smat
from smat.masks import SMatMask
from smat.ops.feature_maps import inverse_or_zero
from smat.ops.smat import attention
from smat.ops.smat.routing import Gates, Inputs, Options, Routing
from smat.ops.smat.triton import groups
from smat.ops.smat.triton import long_range as kernels
from smat.ops.triton.decay import sum_gates

pytestmark = pytest.mark.filterwarnings("ignore::smat.SMatWarning")


@pytest.fixture(autouse=True)
def poison():
    """Fill fresh memory with NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def draw(mask, length, heads=(2, 2, 2), sizes=(8, 8), given=(), reads=None, routed=(), decay=0.1,
         dtype=torch.float32, batch=2):  # fmt: skip
    """Draw inputs; `given` and `routed` name the tensors per token that there are."""
    torch.manual_seed(length)
    num_q, num_k, num_v = heads
    num_heads, (key_dim, value_dim) = max(heads), sizes

    def normal(*shape):
        return torch.randn(batch, length, *shape).to(dtype)

    q, k, v = normal(num_q, key_dim), normal(num_k, key_dim), normal(num_v, value_dim)
    many = (num_heads,) if reads is None else (num_heads, reads)
    types = torch.randint(mask.geometry.num_types, (batch, length, *many))
    profile = torch.randint(mask.geometry.num_profiles, (batch, length, num_v))
    tensors = {
        "log_decay": -decay * torch.rand(batch, length, num_v),
        "key_gate": torch.rand(batch, length, num_k),
        "write_weight": torch.rand(batch, length, num_v),
        "read_weight": torch.rand(types.shape),
        "profile": profile,
        "query_type": types,
    }
    tensors = {name: x if name in (*given, *routed) else None for name, x in tensors.items()}
    gates, routing = (
        kind(**{name: tensors[name] for name in kind._fields}) for kind in (Gates, Routing)
    )
    return Inputs(q, k, v, gates, routing)


def run(inputs, options):
    """Run the kernels as the op does: output, normaliser, gradients, and those of torch."""
    options = options._replace(branch="long_range")
    mask, length = options.mask, inputs.k.shape[1]
    out, normalizer = attention.attend(inputs, options)
    grad_out = torch.randn_like(out)
    expected = attention.attend_backward(inputs, options, grad_out, out, normalizer)
    log_decay, segments = inputs.gates.log_decay, mask.segments(length)
    cum = None
    if log_decay is not None and options.decay_scope == "all":
        cum = sum_gates(log_decay)
    first, y, z = kernels.long_range(inputs, options, mask, segments, cum)
    assert (z is None) != options.normalize
    found, total = torch.zeros_like(out), torch.zeros_like(normalizer)
    found[:, first:] = y
    inverse = delta = None
    if options.normalize:
        total[:, first:] = z
        found *= inverse_or_zero(total).unsqueeze(-1)
        inverse, delta = inverse_or_zero(normalizer), (grad_out * out).sum(-1)
    grads = {name: torch.full(x.shape, 0.5) for name, x in expected.items()}
    kernels.long_range_backward(
        inputs, options, mask, segments, cum, grad_out, inverse, delta, grads
    )
    compared = {name: (grads[name] - 0.5, x) for name, x in expected.items()}
    if options.normalize:
        compared["normalizer"] = total, normalizer
    return {"out": (found, out), **compared}


def check(inputs, options, tolerance=1e-5, grad_tolerance=1e-4):
    for name, (found, expected) in run(inputs, options).items():
        assert not found.isnan().any(), name
        scale = expected.abs().max().clamp(min=1e-3)
        error = ((found - expected).abs().max() / scale).item()
        bar = tolerance if name in ("out", "normalizer") else grad_tolerance
        assert error <= bar, (name, error)


EVERY_TENSOR = ("log_decay", "key_gate", "write_weight")


@pytest.mark.parametrize("vc_dim", [1, 2, 3, 4])
def test_positional(vc_dim):
    mask = SMatMask(seq_len=70, vc_dim=vc_dim, chunk_size=16)
    check(draw(mask, 67), Options(mask))
