"""Non-negative feature maps, heads that share them, the division by their normaliser (Section 2)."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

FeatureMap = str | Callable[[Tensor], Tensor]

# Maps that the op applies itself, and whose derivative follows from their value.
POINTWISE = ("elu", "relu", "identity")
BLOCK_ELEMENTS = 1 << 18  # that a map works through at a time, so that what it needs stays in cache


def pointwise(name: str, x: Tensor, out: Tensor | None = None) -> Tensor:
    """Apply a pointwise map.

    >>> pointwise("elu", torch.tensor([-1.0, 2.0]))
    tensor([0.3679, 3.0000])

    elu(x) + 1 = exp(min(x, 0)) + max(x, 0), which keeps the digits of exp(x) that adding 1 to
    expm1(x) would lose.
    """
    if name == "elu":
        return torch.clamp(x, max=0, out=out).exp_().add_(x.clamp(min=0))
    if name == "relu":
        return torch.clamp(x, min=0, out=out)
    return x


def pointwise_rows(name: str, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Apply a pointwise map to (..., T, f) and lay the result out row by row, in a given dtype."""
    if name == "identity":
        return x.to(dtype).contiguous()
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    length, tokens = x.shape[-2], x.shape[-2]
    if x.device.type == "cpu":
        tokens = max(1, BLOCK_ELEMENTS * length // max(1, x.numel()))
    for start in range(0, length, max(1, tokens)):
        block = slice(start, start + tokens)
        pointwise(name, x[..., block, :].to(dtype), out[..., block, :])
    return out


def pointwise_backward_(name: str, value: Tensor, grad: Tensor) -> Tensor:
    """Turn the gradient of a map's value into that of its argument, in place."""
    if name == "elu":
        return grad.mul_(value.clamp(max=1))
    if name == "relu":
        return grad.mul_(value > 0)
    return grad


def inverse_or_zero(normalizer: Tensor) -> Tensor:
    """Invert normalisers; a query that saw nothing has normaliser 0 and output 0.

    So has one whose weights all fell below the smallest normal number, where 1 / s overflows.
    """
    sees_nothing = normalizer.abs() < torch.finfo(normalizer.dtype).tiny
    return torch.where(sees_nothing, 0.0, normalizer.reciprocal())


def divide_backward(grad: Tensor, out: Tensor, normalizer: Tensor) -> Tensor:
    """Take a gradient through o = y / s, of y and s together: (g / s, -(g . o) / s)."""
    grad_y = grad.new_empty(*grad.shape[:-1], grad.shape[-1] + 1)
    torch.mul(grad, inverse_or_zero(normalizer).unsqueeze(-1), out=grad_y[..., :-1])
    grad_y[..., -1] = -(grad_y[..., :-1] * out).sum(-1)
    return grad_y


class Favor:
    """Performer's positive random features of the softmax kernel, with a fixed seed.

    >>> features = Favor(num_features=256)
    >>> x = torch.tensor([[0.5, -0.3, 0.2]])
    >>> bool((features(x) > 0).all()), features(x).shape[-1]
    (True, 256)

    phi(x) = exp(w . x - |x|^2 / 2) / sqrt(r) with Gaussian w, orthogonal in blocks of the key
    dimension, so that E[phi(q) . phi(k)] = exp(q . k); q and k are scaled by K^(-1/4) first, which
    makes it exp(q . k / sqrt(K)).
    """

    def __init__(self, num_features: int | None = None, seed: int = 0) -> None:
        self.num_features = num_features
        self.seed = seed

    def __call__(self, x: Tensor) -> Tensor:
        """Map (..., K) to (..., r), in fp32 or wider: half precision would round the gradient."""
        key_dim = x.shape[-1]
        wide = x.to(torch.promote_types(x.dtype, torch.float32)) * key_dim**-0.25
        num_features = self.num_features or key_dim
        weights = favor_weights(wide.detach(), num_features, self.seed)
        with torch.autocast(x.device.type, enabled=False):
            exponent = wide @ weights.T - wide.square().sum(-1, keepdim=True) / 2
        return exponent.exp() * num_features**-0.5


@torch.library.custom_op("smat::favor_weights", mutates_args=())
def favor_weights(like: Tensor, num_features: int, seed: int) -> Tensor:
    """Draw w for x like (..., K): (r, K). An operator, since compilers cannot trace a seed."""
    return _orthogonal_gaussian(num_features, like.shape[-1], seed).to(like, copy=True)


@favor_weights.register_fake
def _(like: Tensor, num_features: int, seed: int) -> Tensor:
    return like.new_empty(num_features, like.shape[-1])


@lru_cache(maxsize=16)
def _orthogonal_gaussian(num_rows: int, num_columns: int, seed: int) -> Tensor:
    """Draw Gaussian rows, orthogonal within blocks of as many rows as columns."""
    generator = torch.Generator().manual_seed(seed)
    num_blocks = -(-num_rows // num_columns)
    shape = (num_blocks, num_columns, num_columns)
    draws = torch.randn(shape, generator=generator, dtype=torch.float64)
    rotations = torch.linalg.qr(draws).Q
    lengths = torch.randn(shape, generator=generator, dtype=torch.float64).norm(dim=-1)
    return (rotations * lengths.unsqueeze(-1)).flatten(0, 1)[:num_rows]


def split_feature_map(feature_map: FeatureMap) -> tuple[str, Callable[[Tensor], Tensor] | None]:
    """Return the pointwise map for the op, and a map to apply before it, if there is one."""
    if callable(feature_map):
        return "identity", feature_map
    if feature_map == "favor":
        return "identity", Favor()
    if feature_map not in POINTWISE:
        names = ", ".join((*POINTWISE, "favor"))
        raise ValueError(f"feature_map must be one of {names} or a callable, got {feature_map!r}")
    return feature_map, None


def repeat_heads(x: Any, num_heads: int) -> Any:
    """Repeat each head of (B, T, heads, ...) as often as it takes to have so many; None stays.

    Half precision is widened, so that the gradients of the copies are added up in fp32.
    """
    if x is None or x.shape[2] == num_heads:
        return x
    if x.dtype in (torch.float16, torch.bfloat16):
        x = x.float()
    return x.repeat_interleave(num_heads // x.shape[2], 2)
