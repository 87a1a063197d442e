"""The recurrent ops refuse tensors on another device than their keys, by name."""

import pytest
import torch

from smat.ops.delta_rule import delta_rule
from smat.ops.log_linear import log_linear_attention


def per_token():
    wide, gate = torch.ones(1, 8, 2, 4), torch.zeros(1, 8, 2)
    return {"q": wide, "k": wide, "v": wide, "log_decay": gate}


@pytest.mark.parametrize("name", ["q", "v", "log_decay", "own"])
@pytest.mark.parametrize(
    ("op", "own", "width"),
    [(delta_rule, "beta", ()), (log_linear_attention, "level_weights", (5,))],
)
def test_all_are_on_the_device_of_the_keys(op, own, width, name):
    given = per_token() | {own: torch.ones(1, 8, 2, *width)}
    op(**given)
    name = own if name == "own" else name
    given[name] = given[name].to("meta")
    with pytest.raises(ValueError, match=f"{name} must be on cpu as k is, not on meta"):
        op(**given)
