"""A part of the op's arguments, (B, T, heads, ...), taken and put back with its heads as rows.

G heads of queries, or M heads of values, share a head of keys. A row is one head of keys of one
sequence: N of them are batch rows times key heads. What differs between heads of values has M
before N, so that each of them lies beside what it shares.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

ALL = slice(None)


@dataclass(frozen=True)
class Part:
    """Some batch rows, some key heads, some value heads of each, and a span of time.

    >>> import torch
    >>> first = slice(0, 1)
    >>> part = Part(1, 2, first, first, slice(1, 2), slice(2, 4), slice(2, 4))
    >>> x = torch.arange(10).view(1, 5, 2)  # five tokens, two heads of values
    >>> part.of_values(x)
    tensor([[[5, 7]]])
    """

    group: int  # G
    values_of_key: int  # M of all, of which the part may have some
    batch: slice
    heads: slice
    values: slice
    span: slice
    taken: slice  # the queries in the span

    @property
    def num_rows(self) -> int:
        """N: batch rows times key heads."""
        return (self.batch.stop - self.batch.start) * (self.heads.stop - self.heads.start)

    @property
    def num_values(self) -> int:
        """M: the heads of values of each row."""
        return self.values.stop - self.values.start

    def of_keys(self, x: Tensor, span: slice = ALL) -> Tensor:
        """Take some tokens of this share of (B, T, Hk, ...), as (N, t, ...)."""
        return x[self.batch, self.span, self.heads][:, span].transpose(1, 2).flatten(0, 1)

    def of_values(self, x: Tensor, span: slice = ALL) -> Tensor:
        """Take some tokens of this share of (B, T, Hv, ...), as (M, N, t, ...)."""
        return _rows_first(self._among_values(x[:, self.span], span)).flatten(1, 2)

    def of_queries(self, x: Tensor, taken: slice = ALL) -> Tensor:
        """Take some queries of this share of (B, R, Hq, ...), as (N, G, R, ...)."""
        by_group = x.unflatten(2, (-1, self.group))
        share = by_group[self.batch, self.taken, self.heads][:, taken]
        return share.permute(0, 2, 3, 1, *range(4, share.ndim)).flatten(0, 1)

    def of_answers(self, x: Tensor, taken: slice = ALL) -> Tensor:
        """Take some queries of this share of (B, R, H, ...), as (M, N, G, R, ...)."""
        if self.values_of_key == 1:
            return self.of_queries(x, taken).unsqueeze(0)
        return _rows_first(self._among_values(x[:, self.taken], taken)).flatten(1, 2).unsqueeze(2)

    def _among_values(self, x: Tensor, tokens: slice) -> Tensor:
        """Take this share of (B, T, Hv, ...), as (B', t, Hk', M, ...)."""
        by_row = x.unflatten(2, (-1, self.values_of_key))
        return by_row[self.batch, tokens, self.heads, self.values]

    def put_keys(self, x: Tensor, to: Tensor, span: slice = ALL) -> None:
        """Write (N, t, ...) into this share of (B, T, Hk, ...), or add it to other heads' parts."""
        target = to[self.batch, self.span, self.heads][:, span].transpose(1, 2)
        self._put(x.unflatten(0, target.shape[:2]), target)

    def put_values(self, x: Tensor, to: Tensor, span: slice = ALL) -> None:
        """Write (M, N, t, ...) into this share of (B, T, Hv, ...)."""
        target = _rows_first(self._among_values(to[:, self.span], span))
        target.copy_(x.unflatten(1, target.shape[1:3]))

    def put_queries(self, x: Tensor, to: Tensor, taken: slice = ALL) -> None:
        """Write (N, G, R, ...) into this share of (B, R, Hq, ...), or add it to other heads'."""
        by_group = to.unflatten(2, (-1, self.group))
        target = by_group[self.batch, self.taken, self.heads][:, taken]
        target = target.permute(0, 2, 3, 1, *range(4, target.ndim))
        self._put(x.unflatten(0, target.shape[:2]), target)

    def put_answers(self, x: Tensor, to: Tensor, taken: slice = ALL) -> None:
        """Write (M, N, G, R, ...) into this share of (B, R, H, ...)."""
        if self.values_of_key == 1:
            self.put_queries(x[0], to, taken)
            return
        target = _rows_first(self._among_values(to[:, self.taken], taken))
        target.copy_(x.squeeze(2).unflatten(1, target.shape[1:3]))

    def _put(self, x: Tensor, target: Tensor) -> None:
        """Write, or add if value heads of another share were here before."""
        if self.values.start:
            target += x
        else:
            target.copy_(x)


def _rows_first(x: Tensor) -> Tensor:
    """(B, t, Hk, M, ...) -> (M, B, Hk, t, ...)."""
    return x.permute(3, 0, 2, 1, *range(4, x.ndim))
