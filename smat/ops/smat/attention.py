"""SMat-Attention, forward and backward (Algorithm 1, and the adjoints of the appendix).

The two branches are added and divided once. They are worked off for some heads at a time: features
and answers of a slice are made, used and dropped, and the backward pass makes them again, so that
nothing as long as the sequence is kept but the arguments, the output and its normaliser.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from smat.masks import Segment, SMatMask
from smat.ops.backend import Backend
from smat.ops.feature_maps import pointwise_backward_, pointwise_rows
from smat.ops.linear.causal import CausalGrads
from smat.ops.linear.decay import FORGETS, LogDecay, inverse_or_zero
from smat.ops.smat.routing import Gates, Routing
from smat.ops.smat.slices import HeadSlice, cut_slices


class Options(NamedTuple):
    """What the op does, beside its tensors."""

    mask: SMatMask
    feature_map: str = "elu"
    normalize: bool = True
    branch: str = "both"  # or one of "causal" and "long_range"
    decay_scope: str = "all"  # or "recurrent": distant keys do not decay
    backend: str = "auto"


class Inputs(NamedTuple):
    """The tensors of the op: q (B, T, Hq, K), k (B, T, Hk, K), v (B, T, Hv, V), and per token.

    One of Hq and Hv is Hk, and the larger is H, the heads of the output. Gates, profiles and write
    weights are (B, T, Hv), the key gate (B, T, Hk), types and read weights (B, T, H) or more.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    gates: Gates
    routing: Routing
    cu_seqlens: Tensor | None = None


class Loaded:
    """One slice as the branches take it: features, augmented values, gates, and who sees whom."""

    def __init__(self, part: HeadSlice, inputs: Inputs, options: Options, mask: SMatMask) -> None:
        gates, routing = inputs.gates, inputs.routing
        self.part, self.options, self.mask = part, options, mask
        self.dtype = torch.promote_types(inputs.v.dtype, torch.float32)
        self.phi = self._features(part.of_keys(inputs.q)).flatten(0, 1)  # (N, G, T, r)
        self.features = self._features(part.of_keys(inputs.k)).flatten(0, 2)  # (N, T, r)
        self.key_gate = _rows(gates.key_gate, part.of_keys, self.dtype, 3)
        self.psi = (
            self.features if self.key_gate is None else self.features * self.key_gate[..., None]
        )
        self.v = self._augmented(part.of_values(inputs.v).flatten(0, 1))  # (N, M, T, p)
        self.log_decay = _rows(gates.log_decay, part.of_values, None, 2)  # (N, M, T)
        self.decay = None if self.log_decay is None else LogDecay.of(self.log_decay)
        self.write_weight = _rows(routing.write_weight, part.of_values, self.dtype, 3)
        self.routing = Routing(
            _rows(routing.profile, part.of_values, torch.long, 3),
            self._by_row(_rows(routing.query_type, part.of_values, torch.long, 2)),
            None,
            self._by_row(_rows(routing.read_weight, part.of_values, self.dtype, 2)),
        )
        self.segments = self._segments(routing)

    def _features(self, x: Tensor) -> Tensor:
        return pointwise_rows(self.options.feature_map, x, self.dtype)

    def _augmented(self, v: Tensor) -> Tensor:
        """Append a constant 1 to values, which gathers the normaliser (equation 1)."""
        if not self.options.normalize:
            return v.to(self.dtype).contiguous()
        v_aug = v.new_empty(*v.shape[:-1], v.shape[-1] + 1, dtype=self.dtype)
        v_aug[..., :-1] = v
        v_aug[..., -1] = 1
        return v_aug

    def _by_row(self, x: Tensor | None) -> Tensor | None:
        """(N, G M, T, ...) -> (N M, G, T, ...)."""
        if x is None:
            return None
        return x.reshape(-1, self.phi.shape[1], *x.shape[2:])

    def _segments(self, routing: Routing) -> tuple[Segment, ...]:
        """The mask's segments; at d = 1 every query sees all keys before it, whatever n(t) is.

        Only weights, several reads, gates of one kind or one branch alone tell distant keys from
        recent ones there.
        """
        length, types = self.v.shape[2], routing.query_type
        weighs = routing.write_weight is not None or (types is not None and types.ndim == 4)
        forgets = self.decay is not None and self.options.decay_scope != "all"
        if self.mask.vc_dim == 1 and not weighs and not forgets and self.options.branch == "both":
            return (Segment(0, self.mask.check_length(length), 0),)
        return self.mask.segments(length)

    @property
    def has_local(self) -> bool:
        """Whether the causal branch takes part."""
        return self.options.branch != "long_range"

    @property
    def has_distant(self) -> bool:
        """Whether the long-range branch takes part, and some query sees distant keys."""
        return self.options.branch != "causal" and self.segments[-1].boundary > 0

    def distant_arguments(self) -> tuple[Tensor, Tensor, Tensor, LogDecay | None]:
        """Give every head of values a row of its own, as the long range takes them."""
        num_values = self.v.shape[1]
        phi = self.phi.unsqueeze(1).expand(-1, num_values, -1, -1, -1).flatten(0, 1)
        psi = self.psi.unsqueeze(1).expand(-1, num_values, -1, -1).flatten(0, 1)
        if self.write_weight is not None:
            psi = psi * self.write_weight.unsqueeze(-1)
        decay = self.decay if self.options.decay_scope == "all" else None
        return phi, psi, self.v.flatten(0, 1), decay and LogDecay(*(x.flatten(0, 1) for x in decay))


def _rows(
    x: Tensor | None, view: Callable[[Tensor], Tensor], dtype: torch.dtype | None, depth: int
) -> Tensor | None:
    """Take a slice of something per token, with its leading dimensions joined."""
    if x is None:
        return None
    rows = view(x).flatten(0, depth - 1)
    return rows if dtype is None else rows.to(dtype)


def _load_slices(inputs: Inputs, options: Options) -> Iterator[Loaded]:
    """Load one slice after the other; packed sequences have masks of their own length."""
    for part in cut_slices(inputs.k, inputs.v, inputs.cu_seqlens):
        mask = options.mask
        if inputs.cu_seqlens is not None:
            mask = mask.for_length(part.tokens.stop - part.tokens.start)
        yield Loaded(part, inputs, options, mask)


def attend(inputs: Inputs, options: Options, backend: Backend) -> tuple[Tensor, Tensor]:
    """Run Algorithm 1: the output (B, T, H, V) and the normaliser (B, T, H).

    Both come in the dtype of the sums: the backward pass subtracts the output from the values, and
    where gates are strong an output rounded to half precision would drown what is left.
    """
    v, num_heads = inputs.v, max(inputs.q.shape[2], inputs.v.shape[2])
    wide = torch.promote_types(v.dtype, torch.float32)
    out = v.new_empty(*v.shape[:2], num_heads, v.shape[-1], dtype=wide)
    normalizer = v.new_empty(out.shape[:3], dtype=wide)
    for loaded in _load_slices(inputs, options):
        part = loaded.part
        y = _add_branches(loaded, backend)
        into, total = part.of_values(out), part.of_values(normalizer)
        y = y.view(*into.shape[:4], -1)
        if options.normalize:
            total.copy_(y[..., -1])
            torch.mul(y[..., :-1], inverse_or_zero(total).unsqueeze(-1), out=into)
        else:
            into.copy_(y)
    return out, normalizer


def _add_branches(loaded: Loaded, backend: Backend) -> Tensor:
    """y (N, G M, T, p): the numerator, and with it the normaliser."""
    phi, psi, v, segments = loaded.phi, loaded.psi, loaded.v, loaded.segments
    # Lines 5-7: chunk sums, exclusive scan within each window, dense tiles.
    if loaded.has_local:
        y = backend.causal(phi, psi, v, loaded.decay, segments)
    else:
        y = v.new_zeros(len(v), phi.shape[1] * v.shape[1], *v.shape[2:])
    # Lines 2-4: pool by profile, tabulate, read by type.
    if loaded.has_distant:
        first, y_long = backend.long_range(
            *loaded.distant_arguments(), loaded.routing, loaded.mask, segments
        )
        y[:, :, first:] += y_long.view_as(y[:, :, first:])
    return y


def attend_backward(
    inputs: Inputs,
    options: Options,
    backend: Backend,
    grad_out: Tensor,
    out: Tensor,
    normalizer: Tensor,
) -> dict[str, Tensor]:
    """Find the gradients of all tensors that were given, by name."""
    given = {
        "q": inputs.q, "k": inputs.k, "v": inputs.v, "log_decay": inputs.gates.log_decay,
        "key_gate": inputs.gates.key_gate, "write_weight": inputs.routing.write_weight,
        "read_weight": inputs.routing.read_weight,
    }  # fmt: skip
    grads = {
        name: torch.empty_like(x, dtype=_wide(x)) for name, x in given.items() if x is not None
    }
    for loaded in _load_slices(inputs, options):
        grad_y = _division_backward(loaded, grad_out, out, normalizer)
        _slice_backward(loaded, backend, grad_y, grads)
    return {name: grad.to(given[name].dtype) for name, grad in grads.items()}  # type: ignore[union-attr]


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _division_backward(loaded: Loaded, grad_out: Tensor, out: Tensor, normalizer: Tensor) -> Tensor:
    """Take the output's gradient through the division: (g / s, -(g . o) / s) for o = y / s."""
    grad = loaded.part.of_values(grad_out).flatten(0, 1)  # (N, G M, T, V)
    if not loaded.options.normalize:
        return grad.contiguous()
    answer, total = (loaded.part.of_values(x).flatten(0, 1) for x in (out, normalizer))
    dot = (grad * answer).sum(-1, keepdim=True)
    return torch.cat([grad, -dot], -1).mul_(inverse_or_zero(total).unsqueeze(-1))


def _slice_backward(
    loaded: Loaded, backend: Backend, grad_y: Tensor, grads: dict[str, Tensor]
) -> None:
    """Add the gradients of one slice, of both branches, taken through gates and features."""
    part, name = loaded.part, loaded.options.feature_map
    phi, psi, v, segments = loaded.phi, loaded.psi, loaded.v, loaded.segments
    if loaded.has_local:
        local = backend.causal_backward(phi, psi, v, loaded.decay, segments, grad_y)
    else:
        local = CausalGrads(
            torch.zeros_like(phi), torch.zeros_like(psi), torch.zeros_like(v),
            None if loaded.decay is None else v.new_zeros(v.shape[:3]),
        )  # fmt: skip
    grad_phi, grad_psi, grad_v, grad_gates = local
    if loaded.has_distant:
        by_row = grad_y.view(-1, phi.shape[1], *grad_y.shape[2:])
        distant = backend.long_range_backward(
            *loaded.distant_arguments(), loaded.routing, loaded.mask, segments, by_row
        )
        grad_phi += distant.phi.view(v.shape[0], v.shape[1], *phi.shape[1:]).sum(1)
        grad_v += distant.v.view_as(v)
        far = distant.psi.view(*v.shape[:3], -1)
        if loaded.write_weight is not None:
            weight = loaded.write_weight.view(v.shape[:3])
            part.write(grads["write_weight"], (psi.unsqueeze(1) * far).sum(-1))
            far = far * weight.unsqueeze(-1)
        grad_psi += far.sum(1)
        if grad_gates is not None and distant.log_decay is not None:
            grad_gates = grad_gates + distant.log_decay.view_as(grad_gates)
        if distant.read_weight is not None:
            part.write(grads["read_weight"], distant.read_weight)
    else:
        for each in ("write_weight", "read_weight"):
            if each in grads:
                part.of_values(grads[each]).zero_()
    if grad_gates is not None and loaded.log_decay is not None:
        part.write(grads["log_decay"], grad_gates.masked_fill(loaded.log_decay <= FORGETS, 0.0))
    if loaded.key_gate is not None:
        part.add(grads["key_gate"], (loaded.features * grad_psi).sum(-1))
        grad_psi *= loaded.key_gate.unsqueeze(-1)
    part.add(grads["q"], pointwise_backward_(name, phi, grad_phi))
    part.add(grads["k"], pointwise_backward_(name, loaded.features, grad_psi))
    part.write(grads["v"], grad_v[..., : grads["v"].shape[-1]])
