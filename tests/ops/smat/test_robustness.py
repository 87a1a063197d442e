"""Nothing wrong in silence: function transforms, inputs that do not fit, vanishing weights."""

import math

import pytest
import torch

import smat
from smat.ops import smat_attention_at
from tests.ops.smat.comparison import make_inputs, relative_rms
from tests.ops.smat.decoding import decode, empty_for

pytestmark = pytest.mark.filterwarnings("ignore::smat.SMatWarning")
MASK = smat.SMatMask(64, 3, 8, field_size=3)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_function_transforms():
    inputs = make_inputs(64, batch=2)
    q, k, v = inputs["q"].requires_grad_(), inputs["k"], inputs["v"]

    def loss(q, k, v):
        return smat.smat_attention(q, k, v, MASK)[0].square().sum()

    expected = torch.autograd.grad(loss(q, k, v), q)[0]
    q = q.detach()
    assert torch.equal(torch.func.grad(loss)(q, k, v), expected)
    _, pull = torch.func.vjp(lambda x: loss(x, k, v), q)
    assert torch.equal(pull(torch.ones((), dtype=q.dtype))[0], expected)

    def of_row(q, k, v):
        return loss(q[None], k[None], v[None])

    per_row = torch.func.vmap(torch.func.grad(of_row))(q, k, v)
    assert relative_rms(per_row, expected) <= 1e-14
    shared = torch.func.vmap(lambda x: smat.smat_attention(x[None], k[:1], v[:1], MASK)[0][0])(q)
    alone = torch.cat([smat.smat_attention(x[None], k[:1], v[:1], MASK)[0] for x in q])
    assert relative_rms(shared, alone) <= 1e-14
    with pytest.raises(RuntimeError, match="jvp"):
        torch.func.jvp(lambda x: loss(x, k, v), (q,), (torch.ones_like(q),))


def test_queries_at_repeated_positions():
    inputs = make_inputs(64, batch=1)
    rows = torch.arange(80) % 40  # too many to be written out, and each but the last twice
    whole, _ = smat.smat_attention(mask=MASK, **inputs)
    own = {name: x[:, rows] if name == "q" else x for name, x in inputs.items()}
    some = smat_attention_at(mask=MASK, positions=rows, **own)
    assert relative_rms(some, whole[:, rows]) <= 1e-12
    again, _ = smat.smat_attention(mask=MASK, **inputs, positions=rows)
    assert relative_rms(again, whole[:, rows]) <= 1e-12


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.int8, torch.uint8], ids=str)
def test_indices_of_any_integer_dtype(dtype):
    inputs, shape = make_inputs(64), (2, 64, 2)
    plain, _ = smat.smat_attention(mask=MASK, **inputs)
    routing = {name: torch.ones(shape, dtype=torch.long) for name in ("profile", "query_type")}
    expected, _ = smat.smat_attention(mask=MASK, **inputs, **routing)
    narrow = {name: x.to(dtype) for name, x in routing.items()}
    found, state = smat.smat_attention(mask=MASK, **inputs, **narrow, output_final_state=True)
    assert torch.equal(found, expected)
    at = torch.tensor([5, 40], dtype=dtype)
    assert torch.equal(smat.smat_attention(mask=MASK, **inputs, positions=at)[0], plain[:, [5, 40]])
    token = {name: x[:, 0] for name, x in narrow.items()}
    state.step(*(inputs[name][:, 0] for name in "qkv"), **token)


BAD = {
    "no mask": ({"mask": None}, TypeError, "NoneType"),
    "a list for q": ({"q": [1.0]}, TypeError, "q must be a tensor, got list"),
    "half of a token": ({"attention_mask": torch.full((2, 64), 0.5)}, ValueError, "got 0.5"),
    "an additive mask": (
        {"attention_mask": torch.zeros(2, 64).index_fill(1, torch.tensor([3]), -math.inf)},
        ValueError, "got -inf",
    ),
    "a mask that is no number": (
        {"attention_mask": torch.full((2, 64), math.nan)}, ValueError, "got nan",
    ),
    "a mask of another length": ({"attention_mask": torch.ones(2, 63)}, ValueError, r"\(2, 63\)"),
    "a negative key gate": ({"key_gate": torch.full((2, 64, 2), -0.5)}, ValueError, "-0.5"),
    "a whole gate": ({"log_decay": torch.zeros(2, 64, 2).long()}, ValueError, "int64"),
    "a complex gate": ({"log_decay": torch.zeros(2, 64, 2).cfloat()}, ValueError, "complex64"),
    "a gate elsewhere": ({"log_decay": torch.zeros(2, 64, 2, device="meta")}, ValueError, "meta"),
    "a profile elsewhere": (
        {"profile": torch.zeros(2, 64, 2, device="meta").long()}, ValueError, "meta",
    ),
    "keys elsewhere": (
        {"k": torch.zeros(2, 64, 2, 4, device="meta", dtype=torch.float64)}, ValueError, "meta",
    ),
    "edges elsewhere": (
        {"cu_seqlens": torch.tensor([0, 64], device="meta")}, ValueError, "batch of 1|meta",
    ),
    "heads before time": (
        {name: torch.zeros(2, 65, 64, 4, dtype=torch.float64) for name in "qkv"},
        ValueError, "65",
    ),
    "no heads": (
        {name: torch.zeros(2, 64, 0, 4, dtype=torch.float64) for name in "qkv"},
        ValueError, "got 0",
    ),
    "no width": (
        {name: torch.zeros(2, 64, 2, 0, dtype=torch.float64) for name in "qk"}, ValueError, "0",
    ),
    "a map of another length": (
        {"feature_map": lambda x: x[:, :5].exp()}, ValueError, "width only",
    ),
    "a map to integers": ({"feature_map": lambda x: x.long()}, ValueError, "int64"),
    "a negative position": ({"positions": torch.tensor([-1])}, ValueError, "from -1 to -1"),
    "an unknown scope": ({"decay_scope": "some"}, ValueError, "'some'"),
    "an unknown branch": ({"branch": "left"}, ValueError, "'left'"),
    "an unknown backend": ({"backend": "cuda"}, ValueError, "'cuda'"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_does_not_fit_is_refused_with_the_callers_words(name):
    change, error, message = BAD[name]
    given = {"mask": MASK, **make_inputs(64), **change}
    with pytest.raises(error, match=message):
        smat.smat_attention(**given)


def test_as_many_heads_as_the_mask_has_tokens_are_doubted_but_taken():
    """A prompt of 3 tokens of 64 heads is valid; it may also be 64 tokens of 3 heads."""
    inputs = make_inputs(3, heads=64)
    with pytest.warns(smat.SMatWarning, match=r"\(2, 3, 64, 4\).*3 tokens of 64 heads.*transpose"):
        out, state = smat.smat_attention(mask=MASK, **inputs, output_final_state=True)
    assert relative_rms(out, smat.reference_attention(mask=MASK, **inputs)) <= 1e-12
    assert state.positions == [3, 3]


def test_no_edges_and_no_batch():
    one = make_inputs(64, batch=1)
    for edges in (torch.tensor([], dtype=torch.long), torch.tensor([0])):
        with pytest.raises(ValueError, match="at least two integers"):
            smat.smat_attention(mask=MASK, **one, cu_seqlens=edges)
    none = {name: x[:0] for name, x in make_inputs(64).items()}
    out, state = smat.smat_attention(mask=MASK, **none, output_final_state=True)
    assert out.shape == (0, 64, 2, 3)
    assert len(state) == 0


def test_a_compiled_graph_refuses_a_negative_position():
    torch.compiler.reset()
    inputs = make_inputs(64)
    compiled = torch.compile(
        lambda at: smat.smat_attention(mask=MASK, **inputs, positions=at)[0],
        fullgraph=True, backend="aot_eager",
    )  # fmt: skip
    assert compiled(torch.tensor([3, 7])).shape == (2, 2, 2, 3)
    with pytest.raises(ValueError, match="from -1 to 7"):
        compiled(torch.tensor([-1, 7]))


def test_a_state_takes_no_mask_of_another_length():
    inputs = make_inputs(64)
    _, state = smat.smat_attention(mask=MASK, **inputs, output_final_state=True)
    with pytest.raises(ValueError, match=r"\(2, 3\)"):
        state.extend(
            **{name: x[:, :4] for name, x in inputs.items()}, attention_mask=torch.ones(2, 3)
        )
    assert state.positions == [64, 64]


@pytest.mark.parametrize(
    "gates",
    [
        {"log_decay": [-10.0, -10.0]},
        {"log_decay": [-80.0, -80.0]},
        {"key_gate": [1e-40, 1e-40]},
        {"key_gate": [1e-43, 1e-43]},
        {"log_decay": [-90.0, -90.0], "key_gate": [1e10, 0.0]},  # a gate itself is subnormal
    ],
)
def test_steps_equal_prefill_where_weights_are_all_but_gone(gates):
    inputs = make_inputs(40, batch=1, dtype=torch.float32)
    for name, two in gates.items():
        inputs[name] = torch.tensor(two).repeat(20).view(1, 40, 1).expand(1, 40, 2)
    mask = smat.SMatMask(40, 2, 8)
    whole, _ = smat.smat_attention(mask=mask, **inputs)
    found, _ = decode(empty_for(mask, inputs), inputs)
    torch.testing.assert_close(found, whole, rtol=1e-5, atol=1e-5)
