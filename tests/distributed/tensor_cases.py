"""Every mixer with its heads over ranks beside itself in one process, by name."""

import warnings

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import smat
from smat.layers import (
    DirectedRouting,
    GatedDeltaNet,
    LogLinearGatedDeltaNet,
    LogLinearMamba2,
    Mamba2,
    MixtureOfMemories,
    ProfileMemory,
    SoftmaxAttention,
    TransportedMemory,
    sum_balance_losses,
)
from smat.models.block import Block
from tests.distributed.layer_cases import SHARES, decode_on
from tests.layers.mixers import (
    EVERY_GATE,
    HIDDEN,
    HORIZON,
    LAYERS,
    VOCAB,
    WINDOW,
    distant,
    extras,
    make,
    relative_rms,
    smat_layer,
    tokens,
)

FOUR = {"num_heads": 4, "head_dim": 4}
KEPT = smat.schedules.kept(8)
# With four heads, and groups of heads that four ranks do not divide.
WIDE = {
    "wide softmax": lambda: SoftmaxAttention(
        HIDDEN, **FOUR, num_kv_heads=2, positions="learned", max_length=HORIZON + 8, bias=True,
        conv_size=3, qk_norm=True,
    ),
    "wide smat": lambda: smat_layer(
        **FOUR, num_kv_heads=2, feature_dim=6, conv_size=3, qk_norm=True, **EVERY_GATE,
    ),
    "wide mamba2": lambda: Mamba2(
        HIDDEN, state_dim=4, head_dim=6, num_groups=2, norm_groups=1, bias=True,
        memory=distant(ProfileMemory, 4, WINDOW),
    ),
    "one group": lambda: Mamba2(HIDDEN, state_dim=8, head_dim=3, num_groups=1),
    "wide deltanet": lambda: GatedDeltaNet(
        HIDDEN, **FOUR, memory=distant(TransportedMemory, 4, KEPT)
    ),
    "wide log-linear mamba2": lambda: LogLinearMamba2(
        HIDDEN, state_dim=4, head_dim=6, num_groups=1, num_levels=4
    ),
    "wide log-linear deltanet": lambda: LogLinearGatedDeltaNet(HIDDEN, **FOUR, num_levels=7),
    "wide mixture": lambda: MixtureOfMemories(HIDDEN, 5, num_chosen=2, **FOUR),
}  # fmt: skip
LAYERS_BY_NAME = {**LAYERS, **WIDE}


def build(name):
    """Make a layer of either list."""
    if name in LAYERS:
        return make(name)
    torch.manual_seed(0)
    layer = WIDE[name]()
    with torch.no_grad():
        for parameter in layer.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return layer.double()


def run(layer, x, ids, weigh=None, balance_share=1.0, **options):
    """Return output, cache, balance loss, and the gradient of the input."""
    x = x.clone().requires_grad_()
    out, _, cache = layer(x, **extras(layer, ids), **options)
    shape = out.shape if weigh is None else (len(x), sum(SHARES[2]), HIDDEN)
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(5), dtype=x.dtype)
    balance = sum_balance_losses(layer)
    loss = (out * (weight if weigh is None else weight[:, weigh])).sum()
    if balance is not None:
        loss = loss + balance_share * balance
    loss.backward()
    return out.detach(), cache, balance, x.grad


def compare_heads(name, use_cache=True, packed=None, positions=None):
    """Return the relative errors of a rank."""
    warnings.simplefilter("ignore", smat.SMatWarning)
    alone = build(name)
    torch.manual_seed(dist.get_rank())  # what ranks draw differs; the first one's counts
    dealt = build(name)
    if dist.get_rank():
        with torch.no_grad():
            for parameter in dealt.parameters():
                parameter.add_(1)
    dealt = smat.tensor_parallel(dealt)
    length = HORIZON if packed is None else packed[-1]
    x, ids = tokens(2 if packed is None else 1, length)
    options = {"use_cache": use_cache}
    if packed is not None:
        options = {"cu_seqlens": torch.tensor(packed)}
    if positions is not None:
        options = {"positions": torch.tensor(positions)}
    expected, found = run(alone, x, ids, **options), run(dealt, x, ids, **options)
    errors = {
        "out": relative_rms(found[0], expected[0]),
        "input": relative_rms(found[3], expected[3]),
        **compare_gradients(dealt, alone),
    }
    if expected[2] is not None:
        errors["balance"] = relative_rms(found[2].detach(), expected[2].detach())
    if use_cache and packed is None and positions is None and "learned" not in name:
        errors |= decode_on(dealt, found[1], alone, expected[1], 2)
    return errors


def compare_heads_and_tokens(name):
    """Return the errors where two ranks share heads, and two such pairs a sequence."""
    warnings.simplefilter("ignore", smat.SMatWarning)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    alone, dealt, shares = build(name), smat.tensor_parallel(build(name), mesh["tp"]), SHARES[2]
    x, ids = tokens(2, sum(shares))
    expected = run(alone, x, ids)
    begin = shares[0] * mesh.get_local_rank("cp")
    own = slice(begin, begin + shares[mesh.get_local_rank("cp")])
    with smat.context_parallel(mesh["cp"], shares):
        found = run(dealt, x[:, own], ids[:, own], weigh=slice(begin, own.stop), balance_share=0.5)
    for parameter in dealt.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(parameter.grad.to_local(), group=mesh.get_group("cp"))
    return {
        "out": relative_rms(found[0], expected[0][:, own]),
        "input": relative_rms(found[3], expected[3][:, own]),
        **compare_gradients(dealt, alone),
    }


def refuse():
    """Try what ranks cannot share, two of them."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    odd = {"num_heads": 3, "head_dim": 4}
    three = {"num_heads": 6, "num_kv_heads": 3, "head_dim": 4}
    directed = DirectedRouting(HIDDEN, smat.Geometry(3, 3), vocab_size=VOCAB, num_heads=2)
    dealt = smat.tensor_parallel(make("smat"))
    for model, said in (
        (GatedDeltaNet(HIDDEN, **odd), "3 heads do not fall on 2 ranks: take a number of ranks"),
        (SoftmaxAttention(HIDDEN, **three), "3 key heads neither fall on 2 ranks nor divide them"),
        (
            Mamba2(HIDDEN, head_dim=4, num_groups=3, state_dim=4),
            "3 groups of heads neither fall on",
        ),
        (Mamba2(HIDDEN, head_dim=12, state_dim=3), r"3 rows of 1 heads, of a parameter \(56, 12\)"),
        (smat_layer(routing=directed), "DirectedRouting does not route for some heads"),
        (Block(make("smat"), mlp_ratio=1.25), "15 hidden units do not fall on 2 ranks"),
        (dealt, "dealt over ranks already"),
    ):
        with pytest.raises(ValueError, match=said):
            smat.tensor_parallel(model, mesh)
    two = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    with pytest.raises(ValueError, match="over one dimension of a mesh"):
        smat.tensor_parallel(make("smat"), two)


def compare_gradients(dealt, alone):
    """Return the errors of gradients, put together, by the names of parameters."""
    whole = whole_gradients(dealt)
    wanted = {name: x.grad for name, x in alone.named_parameters() if x.grad is not None}
    largest = max(grad.abs().max().item() for grad in wanted.values())
    errors = {}
    for name, want in wanted.items():
        small = want.abs().max().item() < 1e-12 * largest  # nothing but rounding
        difference = (whole[name] - want).abs().max().item()
        errors[name] = difference / largest if small else relative_rms(whole[name], want)
    return errors


def whole_gradients(model):
    """Put the gradients of dealt parameters together, as `state_dict` does the parameters."""
    with torch.no_grad():
        kept = {name: x.detach().clone() for name, x in model.named_parameters()}
        for x in model.parameters():
            x.copy_(torch.zeros_like(x) if x.grad is None else x.grad)
        whole = {name: x.clone() for name, x in model.state_dict().items()}
        for name, x in model.named_parameters():
            x.copy_(kept[name])
    return whole
