"""bf16 over ranks: mixers and models beside themselves in fp64, and in bf16 in one process."""

import copy
import warnings

import torch

import smat
from smat.layers import sum_balance_losses
from tests.distributed.layer_cases import SHARES
from tests.layers.mixers import extras, make, relative_rms, tokens


def outputs(layer, x, ids, weight, narrow):
    """Return the output and the gradients of input and parameters, by name."""
    x = x.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=narrow):
        out = layer(x, **extras(layer, ids))[0]
    balance = sum_balance_losses(layer)
    loss = (out.to(weight.dtype) * weight).sum()
    (loss if balance is None else loss + balance.to(loss.dtype)).backward()
    return out.detach(), x.grad


def compare_narrow(size, name):
    """Return the errors of bf16 against fp64: of heads over ranks, of tokens, of one process."""
    warnings.simplefilter("ignore", smat.SMatWarning)
    wide = make(name)
    layer = copy.deepcopy(wide).float()
    wide.load_state_dict({key: x.double() for key, x in layer.state_dict().items()})
    x, ids = tokens(2, sum(SHARES[size]), torch.float32)
    weight = torch.randn(x.shape, generator=torch.Generator().manual_seed(5))
    exact = outputs(wide, x.double(), ids, weight.double(), False)
    alone = outputs(copy.deepcopy(layer), x, ids, weight, True)
    dealt = outputs(smat.tensor_parallel(copy.deepcopy(layer)), x, ids, weight, True)
    with smat.context_parallel(shares=SHARES[size]) as ranks:
        own = slice(sum(SHARES[size][: ranks.rank]), sum(SHARES[size][: ranks.rank + 1]))
        cut = outputs(layer, x[:, own], ids[:, own], weight[:, own], True)
    return {
        what: (
            relative_rms(alone[index], exact[index]),
            relative_rms(dealt[index], exact[index]),
            relative_rms(cut[index], exact[index][:, own]),
        )
        for index, what in enumerate(("out", "input"))
    }
