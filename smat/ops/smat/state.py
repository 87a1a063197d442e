"""What survives to the next token: type table, profile tables, recurrent states (Section 3.4).

Tables lie slot by slot and then state by state, so that one token touches one contiguous r x p
state of each of them:

    recent             (slots, B, H, r, p)            R of every open edge
    profile_table      (slots, B, H, profiles, r, p)  Delta of every open edge, until the last fold
    type_table         (buffers, B, H, types, r, p)   U, and the next U while it is being built
    log_decay          (1, B, H, 2)                   lambda: the running sum, and what it lost
    edge_log_decay     (slots, B, H, 2)               lambda when an edge was opened
    profile_log_decay  (slots, B, H, profiles, 2)     lambda when an entry was last written

An edge is the boundary of a segment, and it opens when the token at that boundary arrives. Its keys
up to the next edge are folded into the type table when the next segment begins. Every schedule
needs at most two open edges; edge i lives in slot ``i % slots``, and segment i reads buffer
``i % buffers``, so that edges and tables change places without moving memory.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from typing_extensions import Self

from smat.geometry.field import check_integer
from smat.masks import BoundarySchedule, SMatMask, none
from smat.ops.feature_maps import FeatureMap, split_feature_map
from smat.ops.smat import arguments as check
from smat.ops.smat.cohorts import gather_cohorts

STATES = ("type_table", "profile_table", "recent")
GATES = ("log_decay", "edge_log_decay", "profile_log_decay")
FOLDS = ("spread", "at_once")


Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def isolated(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Keep autograd, autocast and compilers away from the tables of a state.

    >>> @isolated
    ... def double(x):
    ...     return 2 * x
    >>> double(torch.ones(1, requires_grad=True)).requires_grad
    False

    A compiled model calls a step as it stands, between two graphs: what a compiler would make of
    writing into one state while another shares its memory never comes up.
    """

    @wraps(function)
    def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        with torch.no_grad():
            device = next((x.device.type for x in args if isinstance(x, Tensor)), "cpu")
            if not torch.is_autocast_enabled(device):
                return function(*args, **kwargs)
            with torch.autocast(device, enabled=False):
                return function(*args, **kwargs)

    @wraps(function)
    def enter(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        if not torch.compiler.is_compiling():
            return run(*args, **kwargs)
        # Only here, since it loads the compiler, which `import smat` must not.
        uncompiled: Callable[Arguments, Result] = torch.compiler.disable(run)
        return uncompiled(*args, **kwargs)

    return enter


@dataclass(frozen=True)
class StateSpec:
    """How many heads, how large a state r x p is, and which branches it serves."""

    heads: int
    query_heads: int
    feature_dim: int
    value_dim: int
    normalize: bool = True
    weighted: bool = False  # whether distant keys differ from recent ones at d = 1 too
    branch: str = "both"
    decay_scope: str = "all"
    fold: str = "spread"

    def __post_init__(self) -> None:
        for name in ("heads", "query_heads", "feature_dim", "value_dim"):
            check_integer(name, getattr(self, name), least=1)
        if self.query_heads % self.heads:
            raise ValueError(
                f"{self.query_heads} query heads are no multiple of {self.heads} key heads"
            )
        check.check_choice("branch", self.branch, check.BRANCHES)
        check.check_choice("decay_scope", self.decay_scope, check.DECAY_SCOPES)
        check.check_choice("fold", self.fold, FOLDS)

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
        spec: StateSpec,
        feature_map: FeatureMap,
        tensors: Mapping[str, Tensor],
        positions: Sequence[int],
        built: Sequence[int],
    ) -> None:
        self.mask, self.spec, self.feature_map = mask, spec, feature_map
        self.pointwise, self.map_before = split_feature_map(feature_map)
        # Where a query sees all keys alike, no boundary is an event.
        plain = mask.vc_dim == 1 and not self.tells_distant
        self.schedule: BoundarySchedule = none() if plain else mask.schedule
        self.num_slots = 2 if self.schedule.moves else 1  # edges that may be open
        # Two type tables if the next one is built while the current one is read.
        self.num_buffers = 2 if spec.fold == "spread" and self.num_slots == 2 else 1
        self.num_profiles, self.num_types = mask.geometry.num_profiles, mask.geometry.num_types
        self.anchor = mask.anchor  # from which positional types are counted
        self.tensors = dict(tensors)
        self.cohorts = gather_cohorts(positions, built, self.device)
        self._shared: set[str] = set()
        self.numbers: Any = None  # where rows stand, as a backend keeps it on the device

    @property
    def tells_distant(self) -> bool:
        """Whether distant keys count otherwise than recent ones even at d = 1."""
        spec = self.spec
        return spec.weighted or spec.branch != "both" or spec.decay_scope != "all"

    @property
    def has_tables(self) -> bool:
        """Whether distant keys are read at all."""
        return self.spec.branch != "causal"

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
        at = {row: cohort.position for cohort in self.cohorts for row in cohort.rows}
        return [at[row] for row in range(len(self))]

    @property
    def built(self) -> list[int]:
        """How many slabs of its next type table each batch row has finished."""
        done = {row: cohort.built for cohort in self.cohorts for row in cohort.rows}
        return [done[row] for row in range(len(self))]

    def bytes_by_table(self) -> dict[str, int]:
        """Count the bytes of every tensor that there is now."""
        return {name: x.numel() * x.element_size() for name, x in self.tensors.items()}

    @property
    def num_bytes(self) -> int:
        """The bytes of all r x p states; sums of gates are a few numbers beside each."""
        return sum(size for name, size in self.bytes_by_table().items() if name in STATES)

    def __repr__(self) -> str:
        positions = sorted({cohort.position for cohort in self.cohorts})
        return (
            f"{type(self).__name__}({self.mask.describe()}; batch = {len(self)}, "
            f"heads = {self.spec.heads}, r = {self.spec.feature_dim}, p = {self.spec.aug_dim}, "
            f"positions = {positions}, {self.num_bytes} bytes)"
        )

    # Memory.

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape that each tensor has when it is there."""
        slots = self.num_slots
        heads = (len(self), self.spec.heads)
        state = (self.spec.feature_dim, self.spec.aug_dim)
        return {
            "recent": (slots, *heads, *state),
            "profile_table": (slots, *heads, self.num_profiles, *state),
            "type_table": (self.num_buffers, *heads, self.num_types, *state),
            "log_decay": (1, *heads, 2),
            "edge_log_decay": (slots, *heads, 2),
            "profile_log_decay": (slots, *heads, self.num_profiles, 2),
        }

    def allocate(self, *names: str) -> None:
        """Create tensors that are not there yet, as zeros."""
        for name in names:
            if name not in self.tensors:
                dtype = torch.float64 if name in GATES else self.dtype
                shape = self.shapes()[name]
                self.tensors[name] = torch.zeros(shape, dtype=dtype, device=self.device)

    def own(self, name: str) -> Tensor:
        """Return a tensor that may be written: a copy if another state may hold it too."""
        if name in self._shared:
            self.tensors[name] = self.tensors[name].clone()
            self._shared.discard(name)
        return self.tensors[name]

    def fork(self) -> Self:
        """Return a state that shares all memory until one of the two writes to it."""
        other = copy.copy(self)
        other.tensors, other.cohorts = (
            dict(self.tensors),
            [copy.copy(each) for each in self.cohorts],
        )
        self._shared = set(self.tensors)
        other._shared = set(self.tensors)
        return other

    # Batch operations.

    def clone(self) -> Self:
        """Return an independent copy."""
        copies = {name: x.clone() for name, x in self.tensors.items()}
        return self._with(copies, self.positions, self.built)

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> Self:
        """Return a copy on another device or with states of another dtype (fp32 or fp64)."""
        check_dtype(dtype or self.dtype)
        moved = {
            name: x.to(device=device, dtype=dtype if name in STATES else None, copy=True)
            for name, x in self.tensors.items()
        }
        return self._with(moved, self.positions, self.built)

    def select(self, index: Tensor | Sequence[int] | slice) -> Self:
        """Take batch rows, in any order and any number of times: slice, reorder, beam search.

        >>> from smat import SMatState
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

    def _with(
        self, tensors: Mapping[str, Tensor], positions: Sequence[int], built: Sequence[int]
    ) -> Self:
        return type(self)(self.mask, self.spec, self.feature_map, tensors, positions, built)


def check_dtype(dtype: torch.dtype) -> None:
    """Refuse a dtype in which long sums would lose digits."""
    if dtype not in (torch.float32, torch.float64):
        raise ValueError(f"states are held in float32 or float64, got {dtype}")
