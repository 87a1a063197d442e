"""What survives to the next token: type table, profile tables, recurrent states (Section 3.4).

Tables lie slot by slot and then state by state, so that one token touches one contiguous r x p
state of each of them:

    recent             (slots, B, H, r, p)            R of every open edge
    profile_table      (slots, B, H, profiles, r, p)  Delta of every open edge, until the last fold
    profile_epoch      (slots, B, H, profiles)        the edge for which an entry was last written
    type_table         (buffers, B, H, types, r, p)   U, and the next U while it is being built
    log_decay          (1, B, H, 2)                   lambda: the running sum, and what it lost
    edge_log_decay     (slots, B, H, 2)               lambda when an edge was opened
    profile_log_decay  (slots, B, H, profiles, 2)     lambda when an entry was last written

The last three exist once a gate was given. Which slot and which buffer is meant follows from the
position alone, so that edges and buffers change places without moving memory; and an entry of an
older epoch counts as zero, so that no table is ever cleared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import Self

from smat.masks import SMatMask
from smat.ops.feature_maps import FeatureMap, split_feature_map
from smat.ops.row_groups import RowGroup, group_rows
from smat.ops.timeline import Timeline

STATES = ("type_table", "profile_table", "recent")
GATES = ("log_decay", "edge_log_decay", "profile_log_decay")
FOLDS = ("spread", "at_once")


@dataclass(frozen=True)
class StateSizes:
    """How many heads, and how large a state r x p is: p = V + 1 with the normaliser."""

    heads: int
    query_heads: int
    feature_dim: int
    value_dim: int
    normalize: bool = True
    weighted: bool = False  # whether distant keys may have write weights at d = 1 too

    @property
    def aug_dim(self) -> int:
        """p: the values and, if outputs are normalised, the constant 1."""
        return self.value_dim + self.normalize

    @property
    def group(self) -> int:
        """The number of query heads that read the tables of one key head."""
        return self.query_heads // self.heads


class StateTables:
    """The tensors of a decoding state and what can be done with them along the batch.

    A tensor that may be shared with another state is copied before it is written (``own``).
    """

    def __init__(
        self,
        mask: SMatMask,
        sizes: StateSizes,
        feature_map: FeatureMap,
        fold: str,
        tensors: Mapping[str, Tensor],
        positions: Sequence[int],
        built: Sequence[int],
        timeline: Timeline | None = None,
    ) -> None:
        self.mask, self.sizes, self.fold = mask, sizes, check_fold(fold)
        self.feature_map = feature_map
        self.pointwise, self.map_before = split_feature_map(feature_map)
        self.timeline = Timeline(mask, sizes.weighted) if timeline is None else timeline
        self.tensors = dict(tensors)
        self.groups = group_rows(positions, built, self.device)
        self._shared: set[str] = set()

    # Sizes.

    def __len__(self) -> int:
        return self.tensors["recent"].shape[1]

    @property
    def device(self) -> torch.device:
        return self.tensors["recent"].device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the states: fp32 or fp64, whatever the tokens are."""
        return self.tensors["recent"].dtype

    @property
    def positions(self) -> list[int]:
        """The number of tokens that each batch row has seen."""
        return self._per_row("position")

    @property
    def built(self) -> list[int]:
        """How many slabs of its next type table each batch row has finished."""
        return self._per_row("built")

    def _per_row(self, name: str) -> list[int]:
        values = [0] * len(self)
        for group in self.groups:
            for row in group.rows:
                values[row] = getattr(group, name)
        return values

    @property
    def num_buffers(self) -> int:
        """Two type tables if the next one is built while the current one is read."""
        return 2 if self.fold == "spread" and self.timeline.num_slots == 2 else 1

    def bytes_by_table(self) -> dict[str, int]:
        """Count the bytes of every tensor that there is now."""
        return {name: x.numel() * x.element_size() for name, x in self.tensors.items()}

    @property
    def num_bytes(self) -> int:
        """The bytes of all r x p states; epochs and gate sums are a few numbers beside each."""
        return sum(size for name, size in self.bytes_by_table().items() if name in STATES)

    def __repr__(self) -> str:
        positions = sorted({group.position for group in self.groups})
        return (
            f"{type(self).__name__}({self.mask.describe()}; batch = {len(self)}, "
            f"heads = {self.sizes.heads}, r = {self.sizes.feature_dim}, p = {self.sizes.aug_dim}, "
            f"positions = {positions}, {self.num_bytes} bytes)"
        )

    # Memory.

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape that each tensor has when it is there."""
        slots, geometry = self.timeline.num_slots, self.mask.geometry
        rows = (len(self), self.sizes.heads)
        state = (self.sizes.feature_dim, self.sizes.aug_dim)
        return {
            "recent": (slots, *rows, *state),
            "profile_table": (slots, *rows, geometry.num_profiles, *state),
            "profile_epoch": (slots, *rows, geometry.num_profiles),
            "type_table": (self.num_buffers, *rows, geometry.num_types, *state),
            "log_decay": (1, *rows, 2),
            "edge_log_decay": (slots, *rows, 2),
            "profile_log_decay": (slots, *rows, geometry.num_profiles, 2),
        }

    def allocate(self, *names: str) -> None:
        """Create tensors that are not there yet: zeros, and epochs before every edge."""
        for name in names:
            if name in self.tensors:
                continue
            kind = torch.float64 if name in GATES else self.dtype
            fill = 0.0
            if name == "profile_epoch":
                kind, fill = torch.long, -1
            self.tensors[name] = torch.full(
                self.shapes()[name], fill, dtype=kind, device=self.device
            )

    def drop(self, *names: str) -> None:
        """Give tensors up for good."""
        for name in names:
            self.tensors.pop(name, None)

    def own(self, name: str) -> Tensor:
        """Return a tensor that may be written: a copy if another state may hold it too."""
        if name in self._shared:
            self.tensors[name] = self.tensors[name].clone()
            self._shared.discard(name)
        return self.tensors[name]

    def fork(self) -> Self:
        """Return a state that shares all memory until one of the two writes to it."""
        other = self._with(self.tensors, self.positions, self.built)
        self._shared.update(self.tensors)
        other._shared.update(self.tensors)
        return other

    def part(self, lengths: Sequence[int]) -> list[tuple[RowGroup, int]]:
        """Take the groups apart so that the rows of each go on by the same number of tokens."""
        if len(set(lengths)) > 1:
            self.groups = [
                RowGroup(rows, torch.tensor(rows, device=self.device), group.position, group.built)
                for group in self.groups
                for length in sorted({lengths[row] for row in group.rows})
                if (rows := [row for row in group.rows if lengths[row] == length])
            ]
        return [(group, lengths[group.rows[0]]) for group in self.groups]

    def unite(self) -> None:
        """Put rows that have come to stand together into one group."""
        if len(self.groups) > 1:
            self.groups = group_rows(self.positions, self.built, self.device)

    # Batch operations.

    def clone(self) -> Self:
        """Return an independent copy."""
        return self._with(
            {name: x.clone() for name, x in self.tensors.items()}, self.positions, self.built
        )

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> Self:
        """Return a copy on another device or with states of another dtype (fp32 or fp64)."""
        check_dtype(dtype or self.dtype)

        def move(name: str, x: Tensor) -> Tensor:
            return x.to(device=device, dtype=dtype if name in STATES else None, copy=True)

        moved = {name: move(name, x) for name, x in self.tensors.items()}
        return self._with(moved, self.positions, self.built)

    def select(self, index: Tensor | Sequence[int] | slice) -> Self:
        """Take batch rows, in any order and any number of times: slice, reorder, beam search.

        >>> from smat.ops.decode import SMatState
        >>> state = SMatState.empty(SMatMask(64, vc_dim=1), 4, heads=1, key_dim=2, value_dim=2)
        >>> len(state.select([2, 2, 0])), len(state.select(slice(1, None)))
        (3, 3)
        """
        rows = list(range(len(self)))
        if isinstance(index, slice):
            chosen = rows[index]
        else:
            chosen = index.tolist() if isinstance(index, Tensor) else list(index)
            if any(not -len(rows) <= row < len(rows) for row in chosen):
                raise ValueError(f"rows must lie in [0, {len(rows)}), got {chosen}")
        where = torch.tensor([rows[row] for row in chosen], dtype=torch.long, device=self.device)
        positions, built = self.positions, self.built
        return self._with(
            {name: x.index_select(1, where) for name, x in self.tensors.items()},
            [positions[row] for row in chosen],
            [built[row] for row in chosen],
        )

    def repeat_interleave(self, repeats: int) -> Self:
        """Repeat every batch row, copies side by side: the start of a beam search."""
        if repeats < 1:
            raise ValueError(f"repeats must be 1 or more, got {repeats}")
        return self.select([row for row in range(len(self)) for _ in range(repeats)])

    def with_fold(self, fold: str) -> Self:
        """Return a copy that folds "at_once", with one type table, or "spread", with two."""
        other = self._with({"recent": self.tensors["recent"]}, self.positions, [0] * len(self))
        other.fold = check_fold(fold)
        others = {name: x.clone() for name, x in self.tensors.items() if name != "type_table"}
        other.tensors.update(others)
        if "type_table" in self.tensors:
            last = [max(0, position - 1) for position in self.positions]
            segment = torch.tensor(
                [self.timeline.at(position).segment for position in last], device=self.device
            )
            rows = torch.arange(len(self), device=self.device)
            other.allocate("type_table")
            live = self.tensors["type_table"][segment % self.num_buffers, rows]
            other.tensors["type_table"][segment % other.num_buffers, rows] = live
        return other

    def _with(
        self, tensors: Mapping[str, Tensor], positions: Sequence[int], built: Sequence[int]
    ) -> Self:
        return type(self)(
            self.mask, self.sizes, self.feature_map, self.fold, tensors, positions, built,
            self.timeline,
        )  # fmt: skip


def check_fold(fold: str) -> str:
    """Refuse what is no way to fold."""
    if fold not in FOLDS:
        raise ValueError(f"fold must be one of {', '.join(FOLDS)}, got {fold!r}")
    return fold


def check_dtype(dtype: torch.dtype) -> None:
    """Refuse a dtype in which long sums would lose digits."""
    if dtype not in (torch.float32, torch.float64):
        raise ValueError(f"states are held in float32 or float64, got {dtype}")
