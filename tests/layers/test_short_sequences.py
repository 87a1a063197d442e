"""Short sequences are attended to with the mask written out: what the op gives, and its slopes."""

import pytest
import torch

from smat.layers import call
from smat.ops.smat import at_rows
from tests.layers.mixers import LAYERS, extras, make, relative_rms, tokens

pytestmark = pytest.mark.filterwarnings("ignore::smat.SMatWarning")
ATTENDING = [name for name in LAYERS if "smat" in name or "linear att" in name or "mamba2" in name]
ATTENDING += [name for name in LAYERS if "deltanet" in name and "memory" in name]
ATTENDING += [name for name in LAYERS if name.startswith("routed deltanet")]


@pytest.mark.parametrize("name", ATTENDING)
def test_the_mask_written_out_is_the_op(name, monkeypatch):
    layer = make(name)
    x, ids = tokens(2, 20)
    probe, found = torch.randn_like(x), []
    asked = []
    attend_at = call.smat_attention_at
    monkeypatch.setattr(
        call, "smat_attention_at", lambda *a, **k: asked.append(1) or attend_at(*a, **k)
    )
    for short, max_rows in ((20, 64), (19, 64), (20, 0)):
        monkeypatch.setattr(call, "SHORT", short)
        monkeypatch.setattr(at_rows, "MAX_ROWS", max_rows)  # 0: the op, at all positions
        x = x.detach().requires_grad_()
        out = layer(x, **extras(layer, ids))[0]
        leaves = [x, *(each for each in layer.parameters() if each.requires_grad)]
        grads = torch.autograd.grad((out * probe).sum(), leaves, allow_unused=True)
        found.append((len(asked), out, *grads))
    (few, *first), (all_in_all, *second), (_, *third) = found
    assert (few > 0) == ("log-linear" not in name)
    assert all_in_all == few  # the longer one went to the op
    for one, *others in zip(first, second, third, strict=True):
        for other in others:
            assert (one is None) == (other is None)
            assert one is None or relative_rms(one, other) < 1e-10
