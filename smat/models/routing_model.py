"""The one-layer models of subset routing: positions say who is read, landmarks carry payloads."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smat.layers.log_linear import LevelWeights
from smat.layers.primitives import init_decay_rate_, init_step_bias_, l2_norm, step_and_log_decay
from smat.masks import SMatMask
from smat.ops.delta_rule import delta_rule
from smat.ops.feature_maps import Favor
from smat.ops.interface import smat_attention_at
from smat.ops.log_linear import log_linear_attention


class Read(NamedTuple):
    """What a mixer reads: queries at the asked rows, keys and values at all positions."""

    q: Tensor  # (1, R, 1, K)
    k: Tensor  # (1, T, 1, K)
    v: Tensor  # (1, T, 1, V)
    rows: Tensor  # (R,)
    hidden: Tensor  # (1, T, width)

    def all_queries(self) -> Tensor:
        """Lay the queries out among positions that nobody asks at, for a mixer that runs along."""
        q = self.q.new_zeros(1, self.k.shape[1], *self.q.shape[2:])
        return q.index_copy(1, self.rows, self.q)


class SubsetRoutingModel(nn.Module):
    """Position table, one mixer of width 32, read-out; only values carry payloads.

    >>> from smat.tasks import SubsetRouting
    >>> task = SubsetRouting(num_landmarks=3, vc_dim=2)
    >>> model = SubsetRoutingModel("smat", task, vc_dim=2)
    >>> batch = task.train_batch(step=0, batch_size=8, seed=0)
    >>> model(rows=batch.rows, **batch.inputs).shape
    torch.Size([8, 1, 3])

    Queries, keys and gates are projections of a learned position table; the value at landmark l is
    W x_l e_l and 0 at every other position, as the task has it. So what a row makes of landmark l
    is the same in all examples: a coefficient, computed once for all rows that are ever asked, by
    the mixer itself on values e_l. An example then costs k products, whatever T is.

    `mixer`: smat (normalised linear attention, 32 positive random features), softmax, mamba2,
    deltanet, gated_deltanet or log_linear (the recurrences alone, one head, without convolution).
    Normalised reads are left as they are: attention that learns to look at landmarks alone needs no
    factor for the number of positions that a row sees, and one would amplify its jitter. A task
    with `content` adds the request itself to the query.
    """

    def __init__(
        self, mixer: str, task: Any, *, width: int = 64, head_dim: int = 32, vc_dim: int = 1
    ) -> None:
        super().__init__()
        if mixer not in MIXERS:
            raise ValueError(f"mixer must be one of {', '.join(MIXERS)}, got {mixer!r}")
        self.mixer, self.head_dim, length = mixer, head_dim, task.max_length
        self.mask = SMatMask(task.seq_len, vc_dim, task.chunk_size)
        rows = task.rows
        self.landmarks: Tensor
        self.register_buffer("landmarks", task.landmarks, persistent=False)
        if not task.content:  # requests on one row are one query
            rows, query = rows.unique(return_inverse=True)
        else:
            query = torch.arange(len(rows))
        self.rows: Tensor
        self.query_of_request: Tensor
        self.register_buffer("rows", rows, persistent=False)
        self.register_buffer("query_of_request", query, persistent=False)
        self.position = nn.Parameter(torch.empty(length, width))
        self.request_in = nn.Linear(task.num_landmarks, width, bias=False) if task.content else None
        self.q_proj = nn.Linear(width, head_dim, bias=False)
        self.k_proj = nn.Linear(width, head_dim, bias=False)
        self.v_proj = nn.Linear(task.payload_dim, head_dim, bias=False)
        self.head = nn.Linear(head_dim, task.num_outputs, bias=False)
        self.gates = Gates(width, length) if mixer not in ("smat", "softmax") else None
        nn.init.normal_(self.position, std=0.02)

    def coefficients(self) -> Tensor:
        """Return what each query makes of each landmark, (R, k)."""
        x, count = self.position, len(self.landmarks)
        asked = x[self.rows]
        if self.request_in is not None:
            bits = (torch.arange(len(self.rows), device=x.device)[:, None]
                    >> torch.arange(count, device=x.device)) & 1  # fmt: skip
            asked = asked + self.request_in(bits.to(x.dtype) * 2 - 1)
        v = x.new_zeros(len(x), count)
        v[self.landmarks, torch.arange(count, device=x.device)] = 1
        read = Read(self.q_proj(asked)[None, :, None], self.k_proj(x)[None, :, None],
                    v[None, :, None], self.rows, x[None])  # fmt: skip
        return MIXERS[self.mixer](self, read)[0, :, 0]

    def forward(self, rows: Tensor | None = None, *, payload: Tensor, request: Tensor) -> Tensor:
        """Answer requests (B,) about payloads (B, k): (B, 1, k). The rows follow from requests."""
        share = self.coefficients()[self.query_of_request[request]]
        return self.head(self.v_proj(share * payload))[:, None]


class Gates(nn.Module):
    """The gates of the recurrences, from the hidden states: step and decay, beta, level weights."""

    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        self.step_proj = nn.Linear(width, 1, bias=False)
        self.beta_proj = nn.Linear(width, 1, bias=False)
        self.level_weights = LevelWeights(width, 1, math.ceil(math.log2(max(2, length))) + 1)
        self.dt_bias = nn.Parameter(torch.empty(1))
        self.A_log = nn.Parameter(torch.empty(1))
        init_step_bias_(self.dt_bias)
        init_decay_rate_(self.A_log)

    def decay(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return the step and the log decay, (1, T, 1) each."""
        return step_and_log_decay(self.step_proj(hidden), self.dt_bias, self.A_log)


def _smat(model: SubsetRoutingModel, read: Read) -> Tensor:
    return smat_attention_at(
        read.q, read.k, read.v, model.mask, read.rows, feature_map=Favor(model.head_dim)
    )


def _softmax(model: SubsetRoutingModel, read: Read) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (read.q, read.k, read.v))
    causal = torch.arange(k.shape[2], device=k.device) <= read.rows[:, None]
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=causal)
    return y.transpose(1, 2)


def _mamba2(model: SubsetRoutingModel, read: Read) -> Tensor:
    assert model.gates is not None
    step, log_decay = model.gates.decay(read.hidden)
    return smat_attention_at(
        read.q, read.k, read.v * step[..., None], model.mask, read.rows, feature_map="identity",
        normalize=False, log_decay=log_decay,
    )  # fmt: skip


def _delta(model: SubsetRoutingModel, read: Read, decays: bool = False) -> Tensor:
    assert model.gates is not None
    beta = model.gates.beta_proj(read.hidden).sigmoid()
    log_decay = model.gates.decay(read.hidden)[1] if decays else None
    # Queries of one row are the same query, so a row has one place.
    q, k = l2_norm(read.all_queries()), l2_norm(read.k)
    return delta_rule(q, k, read.v, beta, log_decay)[0][:, read.rows]


def _gated_delta(model: SubsetRoutingModel, read: Read) -> Tensor:
    return _delta(model, read, decays=True)


def _log_linear(model: SubsetRoutingModel, read: Read) -> Tensor:
    assert model.gates is not None
    step, log_decay = model.gates.decay(read.hidden)
    weights = model.gates.level_weights(read.hidden)
    y, _ = log_linear_attention(
        read.all_queries(), read.k, read.v * step[..., None], weights, log_decay
    )
    return y[:, read.rows]


MIXERS: dict[str, Callable[[SubsetRoutingModel, Read], Tensor]] = {
    "smat": _smat,
    "softmax": _softmax,
    "mamba2": _mamba2,
    "deltanet": _delta,
    "gated_deltanet": _gated_delta,
    "log_linear": _log_linear,
}
