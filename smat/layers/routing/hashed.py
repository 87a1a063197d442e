"""Who writes where and who reads what by a hash of token ids."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from smat.distributed import HeadRanks
from smat.geometry import Geometry
from smat.layers.call import CallInfo, with_past
from smat.layers.routing.routers import Router, queries_of
from smat.layers.routing.selectors import OwnHyperplane, point_mask
from smat.layers.short_convolution import last_inputs
from smat.masks import SMatMask, TokenHash, agreeing_direction, type_through_cell
from smat.ops.smat.arguments import check_range, check_tensor
from smat.ops.smat.routing import Routing


class HashedRouting(Router):
    """Every token writes to the cell that its id hashes to, and reads a hyperplane through it.

    >>> mask = SMatMask(64, vc_dim=3, chunk_size=16, field_size=3)
    >>> ids = torch.tensor([[5, 9, 5, 7]])
    >>> call = CallInfo(1, 4, ids.device, extras={"token_ids": ids})
    >>> routing, _ = HashedRouting(vocab_size=16, num_heads=2)(torch.randn(1, 4, 8), mask, call)
    >>> torch.equal(routing.profile[:, 0], routing.profile[:, 2])
    True

    A token writes to the cell of the token `write_lag` before it (1 files a value under its key),
    its own where there is none. The direction is one that the cells of the last `num_keys` tokens
    agree on, if there is one (the rule of multi-key recall), or hashed too if `num_keys` is 1;
    ``query_direction`` (B, T, H) as an argument of the layer replaces it. `point_read` reads the
    own cell alone: LSH bucketing.

    Paper: u_t is the cell, a the direction, type(i) = H_(a, a . u).
    """

    extra_inputs: tuple[str, ...] = ("token_ids", "query_direction")

    def __init__(
        self,
        vocab_size: int,
        num_heads: int,
        *,
        write_lag: int = 0,
        num_keys: int = 1,
        point_read: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if write_lag < 0 or num_keys < 1:
            raise ValueError(f"write_lag >= 0 and num_keys >= 1, got {write_lag} and {num_keys}")
        self.vocab_size, self.num_heads, self.seed = vocab_size, num_heads, seed
        self.write_lag, self.num_keys, self.point_read = write_lag, num_keys, point_read
        self.num_kept, self.own_heads = max(write_lag, num_keys - 1), slice(None)
        if point_read:
            self.extra_inputs = ("token_ids",)

    def read_mask(self, mask: SMatMask) -> SMatMask:
        """Return the mask under which the types are read: at d = 2 a hyperplane is a cell."""
        return point_mask(mask) if self.point_read else mask

    def cut_heads(self, ranks: HeadRanks) -> None:
        own = ranks.own(self.num_heads)
        self.own_heads = slice(ranks.rank * own, (ranks.rank + 1) * own)

    def forward(self, x: Tensor, mask: SMatMask, call: CallInfo) -> tuple[Routing, Tensor | None]:
        """Route the tokens of a call by their ``token_ids``; the state is the last ids."""
        ids = _per_token("token_ids", call)
        past, queries = call.inputs_before("routing", ids, self.num_kept), queries_of(call)
        history = with_past(ids, self.num_kept, past)
        # The id `lag` tokens earlier in the same sequence, the own one where none is.
        windows = history.unfold(1, call.length, 1).unbind(1)[::-1]
        position = call.positions()
        lagged = [torch.where(position >= lag, each, ids) for lag, each in enumerate(windows)]
        hashed = TokenHash(self.vocab_size, self.num_heads, mask.geometry, self.seed)
        before = [hashed.profile(each[:, queries]) for each in lagged[: self.num_keys]]
        reads = self.reads(x, mask.geometry, before, ids[:, queries], call)
        state = None
        if call.use_cache:
            state = last_inputs(ids, self.num_kept, past, call.lengths, call.cu_seqlens)
        assert reads.query_type is not None
        query_type = reads.query_type[:, :, self.own_heads]
        profile = hashed.profile(lagged[self.write_lag])[..., self.own_heads]
        return reads._replace(profile=profile, query_type=query_type), state

    def reads(
        self, x: Tensor, geometry: Geometry, cells: list[Tensor], ids: Tensor, call: CallInfo
    ) -> Routing:
        """Say what queries read whose own cell, and those of the keys before it, are given."""
        if self.point_read:
            return Routing(query_type=cells[0])
        if call.extras.get("query_direction") is not None:
            direction = _per_token("query_direction", call, self.num_heads)
            check_range("query_direction", direction, geometry.num_directions)
            direction = direction[:, queries_of(call)]
        elif self.num_keys == 1:
            hashed = TokenHash(self.vocab_size, self.num_heads, geometry, self.seed + 1)
            direction = hashed.profile(ids) % geometry.num_directions
        else:
            direction, _ = agreeing_direction(geometry, torch.stack(cells, -1))
        return Routing(query_type=type_through_cell(geometry, direction, cells[0]))


class DirectedRouting(HashedRouting):
    """`HashedRouting` whose queries choose their direction by a linear map: see `OwnHyperplane`.

    >>> DirectedRouting(8, Geometry(3, 5), vocab_size=16, num_heads=2).selector.num_scores()
    6

    The map reads the layer's queries of all heads, `hidden_size` in all, behind the convolution: so
    it sees the keys that a request names before its own token, where the layer's input does not.
    """

    extra_inputs = ("token_ids",)
    routes_queries = True
    cut_heads = Router.cut_heads  # its map reads the queries of all heads

    def __init__(
        self,
        hidden_size: int,
        geometry: Geometry,
        *,
        vocab_size: int,
        num_heads: int,
        **hashed: Any,
    ) -> None:
        super().__init__(vocab_size, num_heads, **hashed)
        self.selector = OwnHyperplane(hidden_size, num_heads, geometry)

    def reads(
        self, x: Tensor, geometry: Geometry, cells: list[Tensor], ids: Tensor, call: CallInfo
    ) -> Routing:
        return self.selector(x[:, queries_of(call)], cells[0])


def _per_token(name: str, call: CallInfo, *heads: int) -> Tensor:
    """Take an argument of a call, and refuse it unless it is integers (B, T), or (B, T, heads)."""
    x, shape = call.extras.get(name), (call.batch, call.length, *heads)
    if x is not None:
        check_tensor(name, x, "integers")
        if tuple(x.shape) == shape:
            return cast(Tensor, x)
    found = None if x is None else tuple(x.shape)
    raise ValueError(f"hashed routing needs {name} of shape {shape}, got {found}")
