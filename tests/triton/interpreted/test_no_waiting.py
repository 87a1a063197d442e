"""The host never waits for the device, and compilers see the kernels as one operator."""

from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import smat
from smat.ops.smat import arguments
from smat.ops.smat.operator import attend, attend_backward
from smat.ops.smat.triton.decode import fused_step
from tests.ops.smat.comparison import gradients, leaves, make_inputs, mild_gates
from tests.ops.smat.decoding import at, empty_for, make_case

pytestmark = pytest.mark.filterwarnings(
    "ignore::smat.SMatWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"
)
# Operations whose result, or its size, the host must wait for.
WAITING = (
    "_local_scalar_dense", "item", "nonzero", "unique", "masked_select", "is_nonzero", "equal",
    "bincount", "repeat_interleave.Tensor",
)  # fmt: skip
OPERATORS = {each._qualname: each for each in (attend, attend_backward, fused_step)}
MASK = smat.SMatMask(64, 3, 8, field_size=2)


class NeverWait(TorchDispatchMode):
    """Refuse what would make the host wait, if the tensors were on a GPU."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().removeprefix("aten::")
        assert name.split(".")[0] not in WAITING and name not in WAITING, name  # noqa: PT018
        if name.startswith("index"):
            indices = args[1] if isinstance(args[1], (list, tuple)) else []
            assert all(x is None or x.dtype != torch.bool for x in indices), name
        if func.namespace == "smat":  # look into the operators too, which hide what they do
            with self:
                return OPERATORS[func.name()]._init_fn(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def never_wait():
    """Check values as on a GPU, where the device stops by itself."""
    with mock.patch.object(arguments, "LOOKED_AT", ()), NeverWait():
        yield


def case(kind):
    inputs = make_inputs(40, batch=1, heads=1, key_dim=16, value_dim=16, dtype=torch.float32)
    shape = inputs["k"].shape[:3]
    generator = torch.Generator().manual_seed(0)
    reads = (*shape, 2)
    extra = {
        "plain": {},
        "gated": {"log_decay": mild_gates(shape).float(), "key_gate": torch.rand(shape)},
        "routed": {
            "profile": torch.randint(4, shape, generator=generator),
            "query_type": torch.randint(6, reads, generator=generator),
            "write_weight": torch.rand(shape, generator=generator),
            "read_weight": torch.rand(reads, generator=generator),
        },
    }
    return inputs | extra[kind]


def run(tensors, mask=MASK):
    return smat.smat_attention(mask=mask, **tensors, backend="triton")[0]


def test_the_mode_refuses_what_it_should():
    for wait in (
        lambda: torch.ones(1).item(),
        lambda: bool(torch.ones(1)),
        lambda: torch.ones(3).nonzero(),
        lambda: torch.ones(3)[torch.ones(3) > 0],
    ):
        with pytest.raises(AssertionError), NeverWait():
            wait()


@pytest.mark.parametrize("kind", ["plain", "gated", "routed"])
def test_forward_and_backward_never_wait(kind, never_wait):
    own = leaves(case(kind))
    gradients(run(own), own)


@pytest.mark.parametrize("fold", ["spread", "at_once"])
def test_a_step_never_waits(fold, never_wait):
    mask = smat.SMatMask(16, 2, 4, field_size=2, boundary=smat.schedules.window(2))
    inputs = make_case(mask, 5, "gated and routed", batch=1, heads=1, group=1)
    inputs = {name: x.float() if x.is_floating_point() else x for name, x in inputs.items()}
    state = empty_for(mask, inputs, fold=fold)
    for t in range(5):
        state.step(**at(inputs, t), inplace=True, backend="triton")


def test_a_device_that_is_not_asked_still_refuses_values():
    own = case("gated")
    own["log_decay"][0, 3] = 0.5
    with (
        mock.patch.object(arguments, "LOOKED_AT", ()),
        pytest.raises(RuntimeError, match="log_decay must be at most 0"),
    ):
        run(own)


def test_one_graph_serves_the_kernels():
    torch.compiler.reset()
    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend="aot_eager")
    own = leaves(case("gated"))
    expected, found = run(own), compiled(own)
    assert torch.equal(found, expected)
    expected_grads = gradients(expected, own)
    for name, grad in gradients(found, own).items():
        assert torch.equal(grad, expected_grads[name]), name


# Tracing its backward pass asks for many runs of the kernels: the rest is slow.
QUICK = ("test_schema", "test_faketensor")


@pytest.mark.parametrize(
    "utils",
    [QUICK, pytest.param(("test_autograd_registration", "test_aot_dispatch_dynamic"),
                         marks=pytest.mark.slow)],
)  # fmt: skip
def test_the_operator_keeps_its_promises(utils):
    own = leaves(case("gated"))
    tensors = [own[name] for name in ("q", "k", "v", "log_decay", "key_gate")]
    options = MASK.recipe, "elu", True, "both", "all", "triton"
    torch.library.opcheck(attend, ([*tensors, *[None] * 6], *options), test_utils=utils)


def test_the_step_keeps_its_promises():
    """Nothing is written but what is said to be, and the fake output is like the real one."""
    mask = smat.SMatMask(16, 2, 4, field_size=2, boundary=smat.schedules.window(2))
    inputs = make_case(mask, 4, "gated", batch=1, heads=1, group=1)
    inputs = {name: x.float() for name, x in inputs.items()}
    state, calls = empty_for(mask, inputs), []
    for t in range(3):
        state.step(**at(inputs, t), inplace=True, backend="torch")
    with (
        mock.patch("smat.ops.smat.triton.decode.fused_step", lambda *args: calls.append(args)),
        pytest.raises(AttributeError),  # there is no output
    ):
        state.step(**at(inputs, 3), inplace=True, backend="triton")
    torch.library.opcheck(fused_step, calls[0], test_utils=QUICK)
