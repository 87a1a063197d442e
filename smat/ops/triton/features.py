"""Feature maps as kernels apply them while loading, and their derivatives (Section 2)."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load(pointer, inside):
    """Load as fp32; 0 outside."""
    return tl.load(pointer, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def feature(x, MAP: tl.constexpr):
    """Apply a pointwise map to fp32 (`smat.ops.feature_maps.pointwise`); NaN stays NaN."""
    if MAP == "elu":
        return tl.where(x > 0, x + 1, tl.exp(x))
    elif MAP == "relu":
        return tl.where(x < 0, 0.0, x)
    else:
        return x


@triton.jit
def feature_derivative(value, MAP: tl.constexpr):
    """Find the derivative of a map from its value (`pointwise_backward_`)."""
    if MAP == "elu":
        return tl.where(value > 1, 1.0, value)
    elif MAP == "relu":
        return tl.where(value > 0, 1.0, 0.0)
    else:
        return value * 0 + 1


@triton.jit
def load_features(pointer, inside, MAP: tl.constexpr):
    """Load and map; 0 outside, where elu would give 1."""
    return tl.where(inside, feature(load(pointer, inside), MAP), 0.0)
