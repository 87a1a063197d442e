"""The op as compilers see it: one graph, any length, the same bits."""

import pytest
import torch

import smat
from smat.ops.backend import available_backends
from smat.ops.smat.operator import attend
from tests.ops.smat.comparison import gradients, leaves, make_inputs, mild_gates, relative_rms

pytestmark = pytest.mark.filterwarnings(
    "ignore::smat.SMatWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"
)

BACKENDS = available_backends("cpu")
MASK = smat.SMatMask(96, 3, 8, field_size=3)


def arguments(kind, seq_len):
    inputs = make_inputs(seq_len, batch=1 if kind == "packed" else 2, dtype=torch.float32)
    shape = inputs["k"].shape[:3]
    generator = torch.Generator().manual_seed(0)
    extra = {
        "plain": {},
        "gated": {
            "log_decay": mild_gates(shape).float(),
            "key_gate": torch.rand(shape, generator=generator),
            "write_weight": torch.rand(shape, generator=generator),
        },
        "content": {
            "profile": torch.randint(4, shape, generator=generator),
            "query_type": torch.randint(6, shape, generator=generator),
        },
        "reads": {
            "query_type": torch.randint(6, (*shape, 3), generator=generator),
            "read_weight": torch.rand((*shape, 3), generator=generator),
        },
        "padded": {"attention_mask": torch.arange(seq_len).expand(2, -1) > 5},
        "packed": {"cu_seqlens": torch.tensor([0, 20, 20, seq_len])},
        "rows": {"positions": torch.tensor([5, 3, seq_len - 1])},
        "shared": {
            "v": inputs["v"].repeat(1, 1, 2, 1),
            "log_decay": mild_gates((*shape[:2], 2 * shape[2])).float(),
        },
    }
    return inputs | extra[kind]


def run(mask, tensors, **options):
    return smat.smat_attention(mask=mask, **tensors, **options)[0]


@pytest.mark.parametrize(
    "kind", ["plain", "gated", "content", "reads", "padded", "packed", "rows", "shared"]
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_one_graph_serves_every_length(kind, backend):
    torch.compiler.reset()
    graphs = []

    def compiler(graph, example_inputs):
        graphs.append(graph)
        return torch._dynamo.backends.debugging.aot_eager(graph, example_inputs)

    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend=compiler)
    for seq_len in (64, 75, 96):
        own = leaves(arguments(kind, seq_len))
        expected, found = (each(MASK, own, backend=backend) for each in (run, compiled))
        assert torch.equal(found, expected)
        expected_grads = gradients(expected, own)
        for name, grad in gradients(found, own).items():
            assert torch.equal(grad, expected_grads[name]), name
    assert len(graphs) == 1


@pytest.mark.parametrize(
    ("feature_map", "boundary"),
    [
        ("favor", smat.schedules.window(8)),
        (torch.nn.functional.softplus, smat.schedules.doubling()),
    ],
)
def test_other_masks_and_features(feature_map, boundary):
    torch.compiler.reset()
    mask = smat.SMatMask(64, 2, 8, boundary=boundary)
    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend="aot_eager")
    own = leaves(arguments("gated", 64))
    expected = run(mask, own, feature_map=feature_map, normalize=False)
    found = compiled(mask, own, feature_map=feature_map, normalize=False)
    assert relative_rms(found, expected) <= 1e-6


def test_a_compiled_graph_still_checks_values():
    torch.compiler.reset()
    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend="aot_eager")
    own = arguments("gated", 64)
    compiled(MASK, own)
    own["log_decay"][0, 3] = 0.5
    with pytest.raises(ValueError, match=r"at most 0, got 0\.5"):
        compiled(MASK, own)


def test_a_mask_is_part_of_the_graph():
    torch.compiler.reset()
    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend="aot_eager")
    own = arguments("plain", 64)
    for mask in (MASK, smat.SMatMask(64, 2, 8), smat.SMatMask(64, 1, 8)):
        assert torch.equal(compiled(mask, own), run(mask, own))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_operator_keeps_its_promises(dtype, backend):
    """Fake outputs like the real ones, no hidden mutation or aliasing, a traceable backward."""
    own = leaves(arguments("gated", 24))
    tensors = [own[name].detach().to(dtype).requires_grad_() for name in own]
    options = (None, None, None, None, None, MASK.recipe, "elu", True, "both", "all", backend)
    torch.library.opcheck(attend, ([*tensors, *options[:5]], *options[5:]))


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_operator_keeps_its_promises_to_heads_that_share_keys(backend):
    own = leaves(arguments("shared", 24))
    tensors = [own[name] for name in ("q", "k", "v", "log_decay")]
    options = (*[None] * 7, MASK.recipe, "elu", True, "both", "all", backend)
    torch.library.opcheck(attend, ([*tensors, *options[:7]], *options[7:]))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "gated", "padded", "shared"])
def test_inductor(kind):
    torch.compiler.reset()
    compiled = torch.compile(run, fullgraph=True, dynamic=True)
    for seq_len in (64, 75):
        own = leaves(arguments(kind, seq_len))
        expected, found = run(MASK, own), compiled(MASK, own)
        assert relative_rms(found, expected) <= 1e-6
        expected_grads = gradients(expected, own)
        for name, grad in gradients(found, own).items():
            assert relative_rms(grad, expected_grads[name]) <= 1e-5, name
