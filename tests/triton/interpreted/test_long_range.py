"""The long range in Triton's interpreter against torch: outputs and every gradient."""

import pytest
import torch

from smat.masks import SMatMask
from smat.ops.feature_maps import inverse_or_zero
from smat.ops.smat import attention
from smat.ops.smat.routing import Gates, Inputs, Options, Routing
from smat.ops.smat.triton import folds, groups
from smat.ops.smat.triton import long_range as kernels
from smat.ops.triton.decay import sum_gates
from smat.ops.triton.launch import record_launches
from smat.schedules import doubling, window

pytestmark = pytest.mark.filterwarnings("ignore::smat.SMatWarning")


@pytest.fixture(autouse=True)
def poison():
    """Fill fresh memory with NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def draw(mask, length, given=(), heads=(1, 1, 1), sizes=(4, 4), reads=1, dtype=torch.float32,
         batch=1):  # fmt: skip
    """Draw inputs; `given` names the tensors per token that there are."""
    torch.manual_seed(length)
    num_q, num_k, num_v = heads
    key_dim, value_dim = sizes

    def normal(*shape):
        return torch.randn(batch, length, *shape).to(dtype)

    q, k, v = normal(num_q, key_dim), normal(num_k, key_dim), normal(num_v, value_dim)
    types = torch.randint(mask.geometry.num_types, (batch, length, max(heads), reads))
    tensors = {
        "log_decay": -torch.rand(batch, length, num_v) / 5,
        "key_gate": torch.rand(batch, length, num_k),
        "write_weight": torch.rand(batch, length, num_v),
        "read_weight": torch.rand(types.shape),
        "profile": torch.randint(mask.geometry.num_profiles, (batch, length, num_v)),
        "query_type": types,
    }
    gates, routing = (
        kind(*(tensors[name] if name in given else None for name in kind._fields))
        for kind in (Gates, Routing)
    )
    return Inputs(q, k, v, gates, routing)


def run(inputs, options, grad_out=None):
    """Run the kernels as the op does: output, normaliser and gradients, and those of torch."""
    options = options._replace(branch="long_range")
    mask, length = options.mask, inputs.k.shape[1]
    out, normalizer = attention.attend(inputs, options)
    grad_out = torch.randn_like(out) if grad_out is None else grad_out
    other = torch.randn_like(out)  # with the causal branch it is another output; nothing cancels
    expected = attention.attend_backward(inputs, options, grad_out, other, normalizer)
    log_decay, segments = inputs.gates.log_decay, mask.segments(length)
    cum = None
    if log_decay is not None and options.decay_scope == "all":
        cum = sum_gates(log_decay)
    first, y, z = kernels.long_range(inputs, options, mask, segments, cum)
    assert (z is not None) == options.normalize
    found, total = torch.zeros_like(out), torch.zeros_like(normalizer)
    found[:, first:] = y
    inverse = delta = None
    if options.normalize:
        total[:, first:] = z
        found *= inverse_or_zero(total).unsqueeze(-1)
        inverse, delta = inverse_or_zero(normalizer), (grad_out * other).sum(-1)
    grads = {name: torch.full(x.shape, 0.5) for name, x in expected.items()}
    kernels.long_range_backward(
        inputs, options, mask, segments, cum, grad_out, inverse, delta, grads
    )
    compared = {name: (grads[name] - 0.5, x) for name, x in expected.items()}
    if options.normalize:
        compared["normalizer"] = total, normalizer
    return {"out": (found, out), **compared}


def check(inputs, options, tolerance=1e-5, grad_tolerance=1e-4, grad_out=None):
    compared = run(inputs, options, grad_out)
    for name, (found, expected) in compared.items():
        assert not found.isnan().any(), name
        error = ((found - expected).abs().max() / expected.abs().max().clamp(min=1e-2)).item()
        bar = tolerance if name in ("out", "normalizer") else grad_tolerance
        assert error <= bar, (name, error)
    return compared


WEIGHTS = ("log_decay", "key_gate", "write_weight")
ROUTED = ("profile", "query_type", "read_weight")


@pytest.mark.parametrize(("vc_dim", "field_size"), [(1, 2), (2, 3), (3, 2), (4, 2)])
def test_positional(vc_dim, field_size):
    mask = SMatMask(seq_len=50, vc_dim=vc_dim, chunk_size=8, field_size=field_size)
    compared = check(draw(mask, 43), Options(mask))
    assert compared["k"][1].abs().max() > 0.01  # so that the bar means something


@pytest.mark.parametrize("reads", [1, 3])
def test_routed_with_every_gate_and_weight(reads):
    mask = SMatMask(seq_len=50, vc_dim=3, chunk_size=8, field_size=2)
    check(draw(mask, 43, (*WEIGHTS, *ROUTED), batch=2, reads=reads), Options(mask))


@pytest.mark.parametrize("heads", [(4, 2, 2), (1, 1, 2)])
@pytest.mark.parametrize("given", [WEIGHTS, (*WEIGHTS, *ROUTED)])
def test_heads_that_share(heads, given):
    mask = SMatMask(seq_len=40, vc_dim=2, chunk_size=8, field_size=2)
    check(draw(mask, 37, given, heads, reads=2), Options(mask))


@pytest.mark.parametrize("given", [("log_decay",), (*WEIGHTS, *ROUTED)])
@pytest.mark.parametrize(("boundary", "vc_dim"), [(window(8), 3), (doubling(), 2)])
def test_boundaries_that_move(boundary, vc_dim, given):
    mask = SMatMask(seq_len=40, vc_dim=vc_dim, chunk_size=8, field_size=2, boundary=boundary)
    assert len(mask.segments(35)) > 3
    check(draw(mask, 35, given), Options(mask))


@pytest.mark.parametrize("given", [("log_decay",), (*WEIGHTS, *ROUTED)])
@pytest.mark.parametrize("boundary", [None, window(16)])
def test_entries_with_more_visits_than_a_block(monkeypatch, given, boundary):
    monkeypatch.setattr(groups, "BLOCK_VISITS", 4)
    mask = SMatMask(seq_len=50, vc_dim=2, chunk_size=8, field_size=2, boundary=boundary)
    inputs = draw(mask, 43, given)
    if inputs.routing.profile is not None:
        inputs.routing.profile[:, 3:] = 1
        inputs.routing.query_type[:, 3:] = 0
    check(inputs, Options(mask))


@pytest.mark.parametrize("gate", [-50.0, -float("inf")])
def test_strong_gates(gate):
    mask = SMatMask(seq_len=40, vc_dim=2, chunk_size=8, field_size=3, boundary=window(16))
    inputs = draw(mask, 37, ("log_decay",))
    inputs.gates.log_decay[:, ::5] = gate
    inputs.gates.log_decay[:, -20:] = 0
    compared = check(inputs, Options(mask))
    assert compared["out"][1].abs().max() > 0.01


def test_other_options():
    mask = SMatMask(seq_len=40, vc_dim=2, chunk_size=8, field_size=2)
    inputs = draw(mask, 37, (*WEIGHTS, *ROUTED))
    check(inputs, Options(mask, "relu", decay_scope="recurrent"))
    check(inputs, Options(mask, "identity", normalize=False))


@pytest.mark.parametrize("sizes", [(72, 5), (3, 80)])
def test_vectors_of_several_tiles(monkeypatch, sizes):
    mask = SMatMask(seq_len=20, vc_dim=2, chunk_size=4, field_size=2)
    check(draw(mask, 20, WEIGHTS, sizes=sizes), Options(mask))


def test_some_rows_at_a_time(monkeypatch):
    monkeypatch.setattr(folds, "TABLE_BYTES", 700)  # two rows of 4 x 4 + 4 numbers for 4 types
    mask = SMatMask(seq_len=20, vc_dim=2, chunk_size=4, field_size=4 - 1)
    inputs = draw(mask, 20, (*WEIGHTS, *ROUTED), heads=(3, 3, 3))
    with record_launches() as launches:
        check(inputs, Options(mask))
    rows = {launch.arguments["first_row"] for launch in launches if "first_row" in launch.arguments}
    assert rows == {0, 2}


def test_half_precision_and_strides():
    mask = SMatMask(seq_len=40, vc_dim=2, chunk_size=8, field_size=2)
    inputs = draw(mask, 37, WEIGHTS, batch=2, heads=(2, 2, 2), dtype=torch.float16)
    turned = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs[:3])
    grad_out = torch.ones(1).expand(2, 37, 2, 4)
    check(Inputs(*turned, *inputs[3:]), Options(mask), 5e-3, 5e-3, grad_out)


@pytest.mark.slow
@pytest.mark.parametrize("heads", [(2, 2, 2), (4, 2, 2), (1, 1, 2)])
@pytest.mark.parametrize("given", [(), WEIGHTS, (*WEIGHTS, *ROUTED)])
@pytest.mark.parametrize("boundary", [None, window(24)])
@pytest.mark.parametrize("vc_dim", [1, 2, 3, 4])
def test_the_whole_grid(vc_dim, boundary, given, heads):
    mask = SMatMask(seq_len=80, vc_dim=vc_dim, chunk_size=8, boundary=boundary)
    inputs = draw(mask, 77, given, heads, sizes=(20, 12), reads=4)
    check(inputs, Options(mask))
