"""The one-layer models of subset routing: positions say who is read, landmarks carry payloads."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smat.layers.log_linear import LevelWeights
from smat.layers.primitives import init_decay_rate_, init_step_bias_, l2_norm, step_and_log_decay
from smat.masks import SMatMask
from smat.models.mixers import SequenceTask
from smat.ops import smat_attention_at
from smat.ops.delta_rule import delta_rule
from smat.ops.feature_maps import Favor
from smat.ops.log_linear import log_linear_attention


@runtime_checkable
class RoutingTask(SequenceTask, Protocol):
    """What the model must know of subset routing; `smat.tasks.SubsetRouting` says what each is."""

    num_landmarks: int
    seq_len: int
    chunk_size: int
    content: bool
    landmarks: Tensor
    rows: Tensor


@dataclass(frozen=True)
class RoutingModelConfig:
    """A one-layer model of subset routing; see `SubsetRoutingModel`."""

    mixer: str
    vc_dim: int = 1
    width: int = 64
    head_dim: int = 32

    def build(self, task: SequenceTask) -> SubsetRoutingModel:
        """Return the model for a task, with freshly drawn weights."""
        if not isinstance(task, RoutingTask):
            raise ValueError(f"a model of subset routing needs a task with landmarks, got {task}")
        return SubsetRoutingModel(self, task)


class Read(NamedTuple):
    """What a mixer reads: queries at the asked rows, keys and values at all positions."""

    q: Tensor  # (1, R, 1, K)
    k: Tensor  # (1, T, 1, K)
    v: Tensor  # (1, T, 1, V)
    rows: Tensor  # (R,)
    hidden: Tensor  # (1, T, width)
    mask: SMatMask

    def all_queries(self) -> Tensor:
        """Lay the queries out among positions that nobody asks at."""
        return torch.zeros_like(self.k).index_copy(1, self.rows, self.q)


class RecurrenceGates(nn.Module):
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


def _smat(read: Read) -> Tensor:
    features = Favor(read.q.shape[-1])
    return smat_attention_at(read.q, read.k, read.v, read.mask, read.rows, feature_map=features)


def _softmax(read: Read) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (read.q, read.k, read.v))
    causal = torch.arange(k.shape[2], device=k.device) <= read.rows[:, None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=causal).transpose(1, 2)


def _mamba2(read: Read, gates: RecurrenceGates) -> Tensor:
    step, log_decay = gates.decay(read.hidden)
    return smat_attention_at(
        read.q, read.k, read.v * step[..., None], read.mask, read.rows, feature_map="identity",
        normalize=False, log_decay=log_decay,
    )  # fmt: skip


def _deltanet(read: Read, gates: RecurrenceGates, decays: bool = False) -> Tensor:
    log_decay = gates.decay(read.hidden)[1] if decays else None
    beta = gates.beta_proj(read.hidden).sigmoid()
    q, k = l2_norm(read.all_queries()), l2_norm(read.k)
    return delta_rule(q, k, read.v, beta, log_decay)[0][:, read.rows]


def _log_linear(read: Read, gates: RecurrenceGates) -> Tensor:
    step, log_decay = gates.decay(read.hidden)
    weights, v = gates.level_weights(read.hidden), read.v * step[..., None]
    return log_linear_attention(read.all_queries(), read.k, v, weights, log_decay)[0][:, read.rows]


ATTENTION: dict[str, Callable[[Read], Tensor]] = {"smat": _smat, "softmax": _softmax}
RECURRENCES: dict[str, Callable[[Read, RecurrenceGates], Tensor]] = {
    "mamba2": _mamba2,
    "deltanet": _deltanet,
    "gated_deltanet": partial(_deltanet, decays=True),
    "log_linear": _log_linear,
}


class SubsetRoutingModel(nn.Module):
    """Position table, one mixer of width 32, read-out; only values carry payloads.

    >>> from smat.tasks import SubsetRouting
    >>> task = SubsetRouting(num_landmarks=3, vc_dim=2)
    >>> model = SubsetRoutingModel(RoutingModelConfig("smat", vc_dim=2), task)
    >>> batch = task.train_batch(step=0, batch_size=8, seed=0)
    >>> model(rows=batch.rows, **batch.inputs).shape
    torch.Size([8, 1, 3])

    Queries, keys and gates are projections of a learned position table; the value at landmark l is
    W x_l e_l and 0 elsewhere. So what a row makes of landmark l is the same in all examples: a
    coefficient, computed once for all rows that are ever asked, by the mixer itself on values e_l.
    An example then costs k products, whatever T is.

    `mixer`: smat (normalised linear attention, 32 positive random features), softmax, mamba2,
    deltanet, gated_deltanet or log_linear (the recurrences alone, one head, without convolution).
    A task with `content` adds the request itself to the query.
    """

    def __init__(self, config: RoutingModelConfig, task: RoutingTask) -> None:
        super().__init__()
        known = [*ATTENTION, *RECURRENCES]
        if config.mixer not in known:
            raise ValueError(f"mixer must be one of {', '.join(known)}, got {config.mixer!r}")
        width, count, length = config.width, task.num_landmarks, task.max_length
        self.mixer, self.mask = config.mixer, SMatMask(task.seq_len, config.vc_dim, task.chunk_size)
        rows, query = task.rows, torch.arange(len(task.rows))
        if not task.content:  # requests on one row are one query
            rows, query = rows.unique(return_inverse=True)
        self.landmarks = nn.Buffer(task.landmarks, persistent=False)
        self.rows = nn.Buffer(rows, persistent=False)
        self.query_of_request = nn.Buffer(query, persistent=False)
        self.position = nn.Parameter(torch.empty(length, width))
        self.request_in = nn.Linear(count, width, bias=False) if task.content else None
        self.q_proj = nn.Linear(width, config.head_dim, bias=False)
        self.k_proj = nn.Linear(width, config.head_dim, bias=False)
        self.v_proj = nn.Linear(count, config.head_dim, bias=False)
        self.head = nn.Linear(config.head_dim, count, bias=False)
        self.gates = RecurrenceGates(width, length) if config.mixer in RECURRENCES else None
        nn.init.normal_(self.position, std=0.02)

    def coefficients(self) -> Tensor:
        """Return what each query makes of each landmark, (R, k)."""
        x, landmark = self.position, torch.arange(len(self.landmarks), device=self.rows.device)
        asked = x[self.rows]
        if self.request_in is not None:
            bits = (torch.arange(len(self.rows), device=x.device)[:, None] >> landmark) & 1
            asked = asked + self.request_in(bits.to(x.dtype) * 2 - 1)
        v = x.new_zeros(len(x), len(landmark))
        v[self.landmarks, landmark] = 1
        q, k, v = (each[None, :, None] for each in (self.q_proj(asked), self.k_proj(x), v))
        read = Read(q, k, v, self.rows, x[None], self.mask)
        if self.gates is None:
            return ATTENTION[self.mixer](read)[0, :, 0]
        return RECURRENCES[self.mixer](read, self.gates)[0, :, 0]

    def forward(self, rows: Tensor | None = None, *, payload: Tensor, request: Tensor) -> Tensor:
        """Answer requests (B,) about payloads (B, k): (B, 1, k). The rows follow from requests."""
        coefficient = self.coefficients()[self.query_of_request[request]]
        return self.head(self.v_proj(coefficient * payload))[:, None]
