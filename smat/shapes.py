"""The legend of axes: which letter stands for what in every comment that gives a shape.

>>> def pool(psi: Key, v_aug: Value, profile: Index) -> ProfileTable: ...
>>> pool.__annotations__["profile"]
'Index'

Axes of tokens, in this order, as flash-linear-attention has them:
    B   sequences of the batch                T   tokens, in time; R of them are asked for
    H   query heads (H_k key heads, each for a group of H / H_k)
    K   width of a query or key               V   width of a value
    r   features of a key (feature_dim)       p   width of an augmented value (aug_dim): V, or V + 1
                                                  with the normaliser's column of ones
Axes of the geometry F_q^D, D = d - 1 (paper: d the VC dimension, q the field size):
    P   profiles, the q^D points of the space: where a distant token writes
    A   directions                            q   offsets of a direction
    types   num_types = A q, the hyperplanes: what a recent token reads. The paper calls this B;
            a shape does so only where there is no batch, as (B, P) of the incidence matrix does.
    k   reads of a query that has several, each with a weight
Time is cut into segments (queries with one boundary n), chunks (c tokens worked as one tile) and
windows (recent keys of a segment); heads of the batch into slices.

The aliases below are Tensors to Python and to mypy. They annotate where a name alone does not tell
the shape, and nothing checks them.
"""

from __future__ import annotations

from typing import TypeAlias

from torch import Tensor

# Tokens.
Query: TypeAlias = Tensor  # (B, T, H, K), or (B, R, H, K) at the positions asked for
Key: TypeAlias = Tensor  # (B, T, H, K), or (B, T, H, r) once the feature map is applied
Value: TypeAlias = Tensor  # (B, T, H, V), or (B, T, H, p) with its column of ones
Gate: TypeAlias = Tensor  # (B, T, H): log_decay <= 0 in natural log, key_gate, beta
Index: TypeAlias = Tensor  # (B, T, H) int64: profile < P or query_type < types; (B, T, H, k)
Weight: TypeAlias = Tensor  # (B, T, H) write_weight, (B, T, H, k) read_weight
Positions: TypeAlias = Tensor  # (R,) int64, the tokens whose outputs are wanted
Edges: TypeAlias = Tensor  # (S + 1,) int64, where S packed sequences begin and end (cu_seqlens)
Hidden: TypeAlias = Tensor  # (B, T, hidden_size), what a layer takes and gives

# States and tables of states.
KVState: TypeAlias = (
    Tensor  # (B, H, r, p), a sum of psi v_aug': Z of a profile, S_t of a recurrence
)
ProfileTable: TypeAlias = Tensor  # (B, H, P, r, p), one state a profile: F
TypeTable: TypeAlias = Tensor  # (B, H, types, r, p), one state a hyperplane: U = C F
Incidence: TypeAlias = Tensor  # (types, P) bool, which points lie on which hyperplane: C
