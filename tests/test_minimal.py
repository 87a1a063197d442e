"""The page to read first is exact: against the dense oracle, output and every gradient."""

import pytest
import torch

import smat
from smat.minimal import minimal_attention
from tests.ops.smat.comparison import (
    assert_close,
    attend_densely,
    gradients,
    leaves,
    make_inputs,
    mild_gates,
)

pytestmark = pytest.mark.filterwarnings("ignore::smat.SMatWarning")
SCHEDULES = {
    "rebuilt": smat.schedules.rebuilt(),
    "none": smat.schedules.none(),
    "kept": smat.schedules.kept(29),
    "doubling": smat.schedules.doubling(),
    "window": smat.schedules.window(11),
}


@pytest.mark.parametrize("kind", ["plain", "gated", "routed"])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("vc_dim", [1, 2, 3, 4])
def test_one_page_equals_the_oracle(vc_dim, schedule, kind):
    mask = smat.SMatMask(97, vc_dim, 8, field_size=3, boundary=SCHEDULES[schedule])
    inputs = make_inputs(97)
    shape, generator = inputs["k"].shape[:3], torch.Generator().manual_seed(4)
    if kind == "gated":
        inputs["log_decay"] = mild_gates(shape)
    if kind == "routed":
        geometry = mask.geometry
        inputs["profile"] = torch.randint(geometry.num_profiles, shape, generator=generator)
        inputs["query_type"] = torch.randint(geometry.num_types, shape, generator=generator)
    own = leaves(inputs)
    out = minimal_attention(mask=mask, **own)
    assert_close((out.detach(), gradients(out, own)), attend_densely(inputs, mask), torch.float64)
