"""Every mixer over ranks beside itself in one process: output, cache, gradients, by name."""

import warnings

import torch
import torch.distributed as dist

import smat
from smat.layers import sum_balance_losses
from tests.layers.mixers import extras, make, relative_rms, tokens

# Tokens of all ranks; their neighbours look back up to five.
SHARES = {2: [18, 12], 4: [5, 9, 10, 6]}
SHORT_SHARES = {2: [14, 8], 4: [6, 5, 5, 6]}  # of a layer with positions for 22


def run(layer, x, ids, weight, balance_share=1.0, **options):
    """Return the output, the cache, and the gradients of the input and of all parameters."""
    x = x.clone().requires_grad_()
    out, _, cache = layer(x, **extras(layer, ids), **options)
    balance = sum_balance_losses(layer)
    loss = (out * weight).sum()
    if balance is not None:
        loss = loss + balance_share * balance
    named = {name: each for name, each in layer.named_parameters() if each.requires_grad}
    grads = torch.autograd.grad(loss, [x, *named.values()], allow_unused=True)
    filled = [
        torch.zeros_like(x) if grad is None else grad
        for x, grad in zip([x, *named.values()], grads, strict=True)
    ]
    return out.detach(), cache, filled[0], dict(zip(named, filled[1:], strict=True)), balance


def compare_layer(size, name, packed=None, batch=2, use_cache=False):
    """Return the relative errors of a rank."""
    warnings.simplefilter("ignore", smat.SMatWarning)
    layer = make(name)
    is_short = name == "softmax learned"
    shares = (SHORT_SHARES if is_short else SHARES)[size]
    x, ids = tokens(1 if packed else batch, sum(shares))
    weight = torch.randn(x.shape, generator=torch.Generator().manual_seed(5), dtype=x.dtype)
    options = {"use_cache": use_cache}
    if packed:
        options["cu_seqlens"] = torch.tensor([*packed, sum(shares)])
    expected = run(layer, x, ids, weight, **options)
    with smat.context_parallel(shares=shares) as ranks:
        own = slice(sum(shares[: ranks.rank]), sum(shares[: ranks.rank + 1]))
        found = run(layer, x[:, own], ids[:, own], weight[:, own], 1 / size, **options)
    errors = {
        "out": relative_rms(found[0], expected[0][:, own]),
        "input": relative_rms(found[2], expected[2][:, own]),
    }
    largest = max(grad.abs().max().item() for grad in expected[3].values())
    for parameter, grad in found[3].items():
        dist.all_reduce(grad)
        want = expected[3][parameter]
        small = want.abs().max().item() < 1e-12 * largest  # nothing but rounding
        errors[parameter] = (
            (grad - want).abs().max().item() / largest if small else relative_rms(grad, want)
        )
    if expected[4] is not None:
        errors["balance"] = relative_rms(found[4].detach(), expected[4].detach())
    if use_cache and ranks.rank == size - 1 and not is_short:
        errors |= decode_on(layer, found[1], layer, expected[1], batch)
    return errors


@torch.no_grad()
def decode_on(layer, found, other_layer, expected, batch):
    """Let both caches take a few more tokens, each by its layer."""
    x, ids = tokens(batch, 6, seed=9)
    assert torch.equal(found.num_tokens, expected.num_tokens)
    errors = {}
    for t in range(x.shape[1]):
        given = extras(layer, ids[:, t])
        one, found = layer.step(x[:, t], found, **given)
        other, expected = other_layer.step(x[:, t], expected, **given)
        errors[f"step {t}"] = relative_rms(one, other)
    return errors
