"""Every layer under one name, small, with what its forward needs beside hidden states."""

import dataclasses
import itertools

import torch
import torch.nn.functional as F

import smat
from smat.layers import (
    ContentRouting,
    DeltaNet,
    GatedDeltaNet,
    HashedRouting,
    LearnedRouting,
    LogLinearGatedDeltaNet,
    LogLinearMamba2,
    Mamba2,
    MemorySettings,
    MixtureOfMemories,
    ProfileMemory,
    SMatAttention,
    SoftmaxAttention,
    TransportedMemory,
)

HIDDEN, VOCAB, HORIZON = 12, 7, 22
WINDOW = smat.schedules.window(step=4)
CONVOLVED = MemorySettings(selector_conv=6)  # wider than the hash's
REQUEST = dataclasses.replace(MemorySettings.even(), request_tokens=3, request_noise=0.0)


class PlainWrites(ProfileMemory):
    """A memory without the straight-through weight: its gradient is the derivative."""

    def route(self, x, mask, call):
        chosen, *rest = super().route(x, mask, call)
        return chosen._replace(write_weight=self.write_gate(x)), *rest

    def neighbours(self, *given):
        return ()


class PlainTransportedWrites(TransportedMemory):
    """The same for the delta rule."""

    def route(self, x, mask, call):
        chosen, *rest = super().route(x, mask, call)
        return chosen._replace(write_weight=None), *rest

    def neighbours(self, *given):
        return ()


def smat_layer(**options):
    made = {"num_heads": 2, "vc_dim": 3, "horizon": HORIZON, "chunk_size": 4, "field_size": 3}
    return SMatAttention(HIDDEN, **{**made, **options})


def hashed(**options):
    return HashedRouting(VOCAB, 2, **options)


def content(selector):
    geometry = smat.Geometry(3, 3)
    return ContentRouting(LearnedRouting(HIDDEN, 2, geometry, selector=selector, num_reads=2))


def distant(kind, num_heads, boundary, settings="default", selector="top_types"):
    mask = smat.SMatMask(HORIZON, 3, 4, field_size=3, boundary=boundary)
    return kind(HIDDEN, num_heads, mask, num_reads=2, settings=settings, selector=selector)


MAMBA = {"state_dim": 3, "head_dim": 6, "num_groups": 2}
DELTA = {"num_heads": 2, "head_dim": 4}
EVERY_GATE = {"decay_gate": True, "key_gate": True, "output_gate": True, "output_norm": True}
LAYERS = {
    "softmax": lambda: SoftmaxAttention(HIDDEN, num_heads=2),
    "softmax learned": lambda: SoftmaxAttention(
        HIDDEN, num_heads=2, num_kv_heads=1, positions="learned", max_length=HORIZON, qk_norm=True
    ),
    "softmax convolved": lambda: SoftmaxAttention(
        HIDDEN, num_heads=2, positions="none", qk_norm=True, conv_size=3
    ),
    "mamba2": lambda: Mamba2(HIDDEN, **MAMBA),
    "mamba2 memory": lambda: Mamba2(
        HIDDEN, **MAMBA, memory=distant(PlainWrites, 4, smat.schedules.kept(8))
    ),
    "mamba2 window": lambda: Mamba2(HIDDEN, **MAMBA, memory=distant(PlainWrites, 4, WINDOW)),
    "gated deltanet": lambda: GatedDeltaNet(HIDDEN, **DELTA),
    "gated deltanet memory": lambda: GatedDeltaNet(
        HIDDEN, **DELTA, memory=distant(PlainTransportedWrites, 2, smat.schedules.kept(8))
    ),
    "deltanet": lambda: DeltaNet(HIDDEN, **DELTA, allow_neg_eigval=True),
    "routed mamba2": lambda: Mamba2(
        HIDDEN, **MAMBA, memory=distant(ProfileMemory, 4, smat.schedules.kept(8))
    ),
    "routed mamba2 paper": lambda: Mamba2(
        HIDDEN, **MAMBA, memory=distant(ProfileMemory, 4, smat.schedules.kept(8), "paper")
    ),
    "routed mamba2 convolved": lambda: Mamba2(
        HIDDEN, **MAMBA, memory=distant(ProfileMemory, 4, smat.schedules.kept(8), CONVOLVED)
    ),
    "routed mamba2 request": lambda: Mamba2(
        HIDDEN,
        **MAMBA,
        memory=distant(ProfileMemory, 4, smat.schedules.kept(8), REQUEST, "request"),
    ),
    "routed mamba2 request window": lambda: Mamba2(
        HIDDEN, **MAMBA, memory=distant(ProfileMemory, 4, WINDOW, REQUEST, "request")
    ),
    "routed mamba2 scored request": lambda: Mamba2(
        HIDDEN,
        **MAMBA,
        memory=distant(ProfileMemory, 4, smat.schedules.kept(8), REQUEST, "learned_request"),
    ),
    "routed mamba2 scored request window": lambda: Mamba2(
        HIDDEN, **MAMBA, memory=distant(ProfileMemory, 4, WINDOW, REQUEST, "learned_request")
    ),
    "routed deltanet paper": lambda: GatedDeltaNet(
        HIDDEN, **DELTA, memory=distant(TransportedMemory, 2, smat.schedules.kept(8), "paper")
    ),
    "routed mamba2 window": lambda: Mamba2(
        HIDDEN, **MAMBA, memory=distant(ProfileMemory, 4, WINDOW)
    ),
    "routed deltanet": lambda: GatedDeltaNet(
        HIDDEN, **DELTA, memory=distant(TransportedMemory, 2, smat.schedules.kept(8))
    ),
    "log-linear mamba2": lambda: LogLinearMamba2(HIDDEN, **MAMBA, num_levels=4),
    "log-linear deltanet": lambda: LogLinearGatedDeltaNet(HIDDEN, **DELTA, num_levels=7),
    "mixture of memories": lambda: MixtureOfMemories(
        HIDDEN, 5, num_chosen=2, num_heads=2, head_dim=3, expand_v=2.0
    ),
    "linear attention": lambda: smat_layer(vc_dim=1, field_size=None, feature_dim=9),
    "smat": lambda: smat_layer(),
    "smat gated": lambda: smat_layer(conv_size=3, qk_norm=True, num_kv_heads=1, **EVERY_GATE),
    "smat window": lambda: smat_layer(boundary=WINDOW, decay_gate=True, output_gate=True),
    "smat recurrent decay": lambda: smat_layer(decay_gate=True, decay_scope="recurrent"),
    "smat window recurrent decay": lambda: smat_layer(
        boundary=WINDOW, decay_gate=True, decay_scope="recurrent"
    ),
    "smat favor": lambda: smat_layer(feature_map="favor", feature_dim=8, output_norm=True),
    "smat hashed": lambda: smat_layer(routing=hashed(write_lag=1, num_keys=2), conv_size=3),
    "smat read gate": lambda: smat_layer(
        routing=hashed(write_lag=1), boundary=WINDOW, read_gate=True, **EVERY_GATE
    ),
    "smat content weighed": lambda: smat_layer(routing=content("top_types"), read_gate=True),
    "smat bucketed": lambda: smat_layer(routing=hashed(point_read=True)),
    "smat content": lambda: smat_layer(routing=content("top_types"), decay_gate=True),
    "smat content hyperplane": lambda: smat_layer(routing=content("own_hyperplane")),
    "smat content bucket": lambda: smat_layer(routing=content("own_cell"), normalize=False),
    "smat hashed direction": lambda: smat_layer(routing=hashed(), decay_gate=True),
}

# Their gradient is that of a surrogate, and rounding can move a token to another cell; or to
# another memory.
STRAIGHT_THROUGH = {name for name in LAYERS if name.startswith(("smat content", "routed"))}
ROUNDING_ROUTES = STRAIGHT_THROUGH | {
    "mixture of memories", "mamba2 memory", "mamba2 window", "gated deltanet memory",
}  # fmt: skip


def make(name, dtype=torch.float64, seed=0):
    """Build a layer, with parameters that no default hides."""
    torch.manual_seed(seed)
    layer = LAYERS[name]()
    with torch.no_grad():
        for parameter in layer.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return layer.to(dtype)


def tokens(batch, length, dtype=torch.float64, seed=1):
    """Draw hidden states, and ids for the layers that route by them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, length, HIDDEN, generator=generator, dtype=torch.float64)
    return x.to(dtype), torch.randint(VOCAB, (batch, length), generator=generator)


def extras(layer, ids):
    """Return what a layer takes beside hidden states."""
    return {"token_ids": ids} if "token_ids" in layer.extra_inputs else {}


def relative_rms(found, expected):
    """Return the RMS of the difference over that of what is expected."""
    assert found.shape == expected.shape
    difference = (found.double() - expected.double()).square().mean().sqrt()
    return (difference / expected.double().square().mean().sqrt().clamp(min=1e-30)).item()


def unpacked(x, edges):
    return [x[:, start:stop] for start, stop in itertools.pairwise(edges)]


def convolve(x, conv):
    """Convolve by torch's own grouped convolution."""
    weight = conv.weight.unsqueeze(1)
    padded = F.pad(x.mT, (conv.width - 1, 0))
    return F.silu(F.conv1d(padded, weight, conv.bias, groups=conv.channels)).mT
