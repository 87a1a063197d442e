"""The formulas of the bytes that kernels move, against what they load and store."""

import pytest
import torch

import smat
from smat.bench.bytes_moved import cuts_of
from smat.bench.launches import Case
from smat.bench.traffic import Cuts, bytes_of
from smat.ops.smat.routing import Options
from smat.ops.smat.triton import attention
from smat.ops.triton.launch import record_launches
from tests.ops.smat.decoding import at
from tests.triton.interpreted.counting import count_bytes

pytestmark = pytest.mark.filterwarnings("ignore::smat.SMatWarning")


def assert_counted(run, cuts):
    with record_launches() as launches, count_bytes() as counted:
        run()
    assert len(launches) == len(counted) > 0
    for launch, found in zip(launches, counted, strict=True):
        assert bytes_of(launch, cuts) == found, launch.name


CASES = {
    "d = 1": Case(vc_dim=1, seq_len=70, width=16, dtype="fp16"),
    "d = 2, gated": Case(vc_dim=2, seq_len=150, width=16, dtype="fp32", gated=True),
    "d = 3, grouped": Case(vc_dim=3, seq_len=131, width=16, dtype="fp16", group=2),
}
SLOW = {
    "d = 3, wide": Case(vc_dim=3, seq_len=200, width=96, dtype="fp16", gated=True, heads=2),
    "d = 4": Case(vc_dim=4, seq_len=260, width=16, dtype="fp32", heads=2, gated=True, group=2),
    "window": Case(vc_dim=3, seq_len=260, width=16, dtype="fp16", gated=True, window_step=50),
}
MARKED = [
    *(pytest.param(case, id=name) for name, case in CASES.items()),
    *(pytest.param(case, id=name, marks=pytest.mark.slow) for name, case in SLOW.items()),
]


@pytest.mark.parametrize("case", MARKED)
def test_forward_and_backward(case):
    inputs, options = case.inputs(device="cpu"), Options(case.mask)
    cuts = cuts_of(case)
    answers = []
    assert_counted(lambda: answers.extend(attention.attend(inputs, options)), cuts)
    grad = torch.ones_like(answers[0]).to(inputs.v.dtype)
    assert_counted(lambda: attention.attend_backward(inputs, options, grad, *answers), cuts)


@pytest.mark.parametrize("routed", [False, True])
def test_step(routed):
    case = Case(2, 128, width=8, dtype="fp16", gated=True, routed=routed, group=2, window_step=2)
    spec = {"query_heads": 2, "weighted": routed}
    state = smat.SMatState.empty(case.mask, 1, 1, 8, 8, **spec)
    inputs = case.inputs(6, "cpu")
    tensors = dict(zip("qkv", inputs[:3], strict=True)) | inputs.gates._asdict()
    tensors |= inputs.routing._asdict()
    tensors = {name: x for name, x in tensors.items() if x is not None}
    for t in range(5):
        _, state = state.step(**at(tensors, t), inplace=True, backend="torch")
    last = at(tensors, 5)
    if routed:  # an entry that two heads of the group ask for would count once
        last["query_type"] = torch.arange(8).view(1, 2, 4)
    run = lambda: state.step(**last, inplace=True, backend="triton")  # noqa: E731
    assert_counted(run, Cuts([], []))
