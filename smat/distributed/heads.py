"""Heads over ranks: what a rank holds of a layer's parameters, and what ranks add up.

All ranks have the same tokens and hidden states; each works on its own heads, and the outputs of
all are added up. So whatever enters has a part of its gradient on every rank.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn


class HeadRanks:
    """The ranks of a mesh of one dimension, over which the heads of layers are dealt.

    A layer says in `cut_heads` what of it belongs to heads: `cut`, `share` and `add_up` replace its
    parameters by DTensors, of which the layer sees its own part.
    """

    def __init__(self, mesh: Any) -> None:
        self.mesh, self.group = mesh, mesh.get_group()
        self.rank, self.size = mesh.get_local_rank(), mesh.size()

    def own(self, heads: int, what: str = "heads") -> int:
        """Return how many of the heads are a rank's own."""
        if heads % self.size:
            raise ValueError(
                f"{heads} {what} do not fall on {self.size} ranks: take a number of ranks that "
                f"divides {heads}"
            )
        return heads // self.size

    def own_groups(self, groups: int, what: str = "groups of heads") -> int:
        """Return how many groups the heads of a rank are of: its own, or one that others share."""
        if groups % self.size and self.size % groups:
            raise ValueError(
                f"{groups} {what} neither fall on {self.size} ranks nor divide them: take a number "
                f"of ranks that divides {groups}, or a multiple of it"
            )
        return max(1, groups // self.size)

    def enter(self, x: Tensor) -> Tensor:
        """Pass on what all ranks have; its gradients are added up."""
        return _Enter.apply(x, self)

    def leave(self, x: Tensor) -> Tensor:
        """Add up what the ranks have, for all of them; the gradient of the sum is everyone's."""
        return _Leave.apply(x, self)

    def total(self, x: Tensor) -> Tensor:
        """Add up what the ranks have, for each to go on with alone."""
        return self.leave(self.enter(x))

    def mean(self, x: Tensor) -> Tensor:
        """Average a loss over ranks, which all have as their own."""
        return self.leave(x) / self.size

    def add(self, x: Tensor) -> Tensor:
        """Add up over ranks in fp32 or wider."""
        wide = x.detach().to(torch.promote_types(x.dtype, torch.float32), copy=True).contiguous()
        dist.all_reduce(wide, group=self.group)
        return wide.to(x.dtype)

    def cut(
        self,
        module: nn.Module | None,
        *segments: tuple[int, int],
        names: Iterable[str] | None = None,
        dim: int = 0,
    ) -> None:
        """Cut parameters of a module, all of its own unless named, by (rows, heads) of segments."""
        self._hold(module, Cut(self, dim, tuple(Segment(*each) for each in segments)), names)

    def share(self, *modules: nn.Module | None) -> None:
        """Let all ranks hold the parameters of modules that all of their heads use."""
        for module in modules:
            self._hold(module, Cut(self))

    def split_mlp(self, mlp: nn.Module) -> None:
        """Cut the hidden units between the two linear maps of an MLP."""
        linear = [each for each in mlp.modules() if isinstance(each, nn.Linear)]
        if len(linear) != 2 or linear[0].out_features != linear[1].in_features:
            raise ValueError(f"an MLP has two linear maps, one behind the other, got {linear}")
        first, last = linear
        self.own(first.out_features, "hidden units")
        self.cut(first, (first.out_features, first.out_features))
        first.register_forward_pre_hook(lambda _, inputs: (self.enter(inputs[0]),))
        self.add_up(last, last.in_features)

    def add_up(self, linear: nn.Linear, heads: int) -> None:
        """Cut the inputs of a linear map, and add up its outputs; the bias is everyone's."""
        self.cut(linear, (linear.in_features, heads), names=["weight"], dim=1)
        self._hold(linear, Cut(self, adds_up=False), ["bias"])
        linear.__class__ = type("Linear", (_AddUp, type(linear)), {"ranks": self})

    def _hold(self, module: nn.Module | None, cut: Cut, names: Iterable[str] | None = None) -> None:
        from smat.distributed.plans import hold  # which loads what DTensor needs

        if module is not None:
            hold(module, dict.fromkeys(module._parameters if names is None else names, cut))


class Segment(NamedTuple):
    """Rows of a parameter that belong to so many heads, side by side."""

    rows: int
    heads: int


@dataclass(frozen=True)
class Cut:
    """How ranks hold a parameter: by segments along a dimension, or all of it.

    A segment of fewer heads than ranks is dealt out too where it stands beside others, and put
    together when it is used: one row has one place, and one gradient.
    """

    ranks: HeadRanks
    dim: int = 0
    segments: tuple[Segment, ...] = ()
    adds_up: bool = True  # whether every rank has a part of the gradient of what all hold

    @property
    def is_dealt(self) -> bool:
        """Whether each rank holds a part."""
        return any(each.heads % self.ranks.size == 0 for each in self.segments)

    def deal(self, whole: Tensor) -> Tensor:
        """Put the rows of a parameter in the order of ranks."""
        if not self.is_dealt:
            return whole
        for rows, heads in self.segments:
            if rows % self.ranks.size:
                raise ValueError(
                    f"{rows} rows of {heads} heads, of a parameter {tuple(whole.shape)}, do not "
                    f"fall on {self.ranks.size} ranks"
                )
        parts = whole.split([each.rows for each in self.segments], self.dim)
        by_rank = zip(*(part.chunk(self.ranks.size, self.dim) for part in parts), strict=True)
        return torch.cat([part for own in by_rank for part in own], self.dim)

    def collect(self, dealt: Tensor) -> Tensor:
        """Put the rows of all ranks back into the order of heads."""
        if not self.is_dealt:
            return dealt
        size = self.ranks.size
        own = [each.rows // size for each in self.segments]
        by_rank = [part.split(own, self.dim) for part in dealt.chunk(size, self.dim)]
        return torch.cat([part for parts in zip(*by_rank, strict=True) for part in parts], self.dim)

    def local(self, parameter: Any) -> Tensor:
        """Return the rows that this rank's heads use, with a gradient for the parameter."""
        own: Tensor = parameter.to_local()
        size = self.ranks.size
        if not self.is_dealt:
            own = self.ranks.enter(own) if self.adds_up else own
        if all(each.heads % size == 0 for each in self.segments):
            return own
        rows = [each.rows // (size if self.is_dealt else 1) for each in self.segments]
        parts = zip(own.split(rows, self.dim), self.segments, strict=True)
        return torch.cat([self._of_own_heads(part, each) for part, each in parts], self.dim)

    def _of_own_heads(self, part: Tensor, segment: Segment) -> Tensor:
        rank, size = self.ranks.rank, self.ranks.size
        if segment.heads % size == 0:
            return part
        if self.is_dealt:
            nothing = torch.zeros_like(part)
            around = [nothing] * rank, [nothing] * (size - 1 - rank)
            part = self.ranks.total(torch.cat([*around[0], part, *around[1]], self.dim))
        width = segment.rows // segment.heads
        return part.narrow(self.dim, rank * segment.heads // size * width, width)


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: HeadRanks) -> Tensor:
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.ranks.add(grad), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: HeadRanks) -> Tensor:
        return ranks.add(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _AddUp(nn.Linear):
    """A linear map of which each rank has some inputs."""

    ranks: HeadRanks

    def forward(self, x: Tensor) -> Tensor:
        out = self.ranks.leave(nn.functional.linear(x, self.weight))
        return out if self.bias is None else out + self.bias.to(out.dtype)
