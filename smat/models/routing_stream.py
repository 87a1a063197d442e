"""The subset-routing models as they run on a batch: whole, as prefill, one token (tab:e2e-routing).

`SubsetRoutingModel` computes a coefficient a landmark once for all examples; what a batch costs is
seen here, where every example goes through projections, mixer and read-out.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from smat.layers.primitives import l2_norm
from smat.masks import SMatMask, SMatWarning, none
from smat.models.routing_model import RecurrenceGates
from smat.ops import SMatState, smat_attention
from smat.ops.delta_rule import delta_rule, delta_rule_step
from smat.ops.feature_maps import Favor
from smat.ops.log_linear import LogLinearState, log_linear_attention, log_linear_step

NUM_OUTPUTS = 6  # landmarks of the hardest column of the paper's table


@dataclass
class KeysAndValues:
    """What softmax keeps: keys and values of all tokens, laid out up to the horizon."""

    keys: Tensor  # (B, H, S, K)
    values: Tensor  # (B, H, S, V)
    num_tokens: int


State = SMatState | LogLinearState | KeysAndValues | Tensor


class RoutingStream(nn.Module):
    """Projections, one head of a mixer without a convolution, and the read-out.

    >>> import torch
    >>> model = RoutingStream("smat", horizon=64, vc_dim=2, chunk_size=8)
    >>> x = torch.randn(2, 33, 64)
    >>> whole, _ = model(x)
    >>> _, state = model(x[:, :32], keep_state=True)
    >>> with torch.no_grad():
    ...     last, state = model.step(x[:, 32], state)
    >>> torch.allclose(last, whole[:, 32], atol=1e-5)
    True

    `mixer`: smat (32 positive random features; `gated` adds a decay), softmax, mamba2, deltanet,
    gated_deltanet or log_linear.
    """

    def __init__(
        self, mixer: str, *, horizon: int, vc_dim: int = 1, gated: bool = False, width: int = 64,
        head_dim: int = 32, chunk_size: int = 64,
    ) -> None:  # fmt: skip
        super().__init__()
        self.mixer, self.horizon, self.gated = mixer, horizon, gated
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SMatWarning)  # a cost does not depend on VC = d
            self.mask = SMatMask(horizon, vc_dim, chunk_size)
        self.features = Favor(head_dim)
        self.plain_mask = SMatMask(1, vc_dim=1, chunk_size=chunk_size, boundary=none())
        self.qkv_proj = nn.Linear(width, 3 * head_dim, bias=False)
        self.gates = RecurrenceGates(width, horizon)
        self.head = nn.Linear(head_dim, NUM_OUTPUTS, bias=False)

    def forward(self, x: Tensor, keep_state: bool = False) -> tuple[Tensor, State | None]:
        """Mix (B, T, width) into (B, T, outputs); the state after them if that is wanted."""
        given = self._inputs(x)
        state: State | None = None
        if self.mixer == "softmax":
            q, k, v = (each.transpose(1, 2) for each in given.values())
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
            state = self._keys_and_values(k, v) if keep_state else None
        elif self.mixer in ("smat", "mamba2"):
            options: dict[str, Any] = {"mask": self.mask, "feature_map": self.features}
            if self.mixer == "mamba2":
                options = {"mask": self.plain_mask, "feature_map": "identity", "normalize": False}
            out, state = smat_attention(**given, **options, output_final_state=keep_state)
        else:
            run: Any = log_linear_attention if self.mixer == "log_linear" else delta_rule
            out, state = run(**given, output_final_state=keep_state)
        return self.head(out.flatten(-2)), state

    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        """Take one token, (B, width); the state is overwritten."""
        given = self._inputs(x)
        if isinstance(state, KeysAndValues):
            state.keys[:, :, state.num_tokens] = given["k"]
            state.values[:, :, state.num_tokens] = given["v"]
            state.num_tokens += 1
            keys, values = (x[:, :, : state.num_tokens] for x in (state.keys, state.values))
            q = given["q"].unsqueeze(2)
            out = F.scaled_dot_product_attention(q, keys, values).squeeze(2)
            return self.head(out.flatten(-2)), state
        after: State
        if isinstance(state, SMatState):
            q, k, v = (given.pop(name) for name in "qkv")
            out, after = state.step(q, k, v, **given, inplace=True)
        elif isinstance(state, LogLinearState):
            out, after = log_linear_step(**given, state=state)
        else:
            out, after = delta_rule_step(**given, state=state)
        return self.head(out.flatten(-2)), after

    def state_after(self, x: Tensor) -> State:
        """Return the state after (B, T, width); softmax needs no attention for it."""
        if self.mixer == "softmax":
            _, k, v = (each.transpose(1, 2) for each in self._inputs(x).values())
            return self._keys_and_values(k, v)
        _, state = self(x, keep_state=True)
        assert state is not None
        return state

    def _inputs(self, x: Tensor) -> dict[str, Any]:
        """Project (..., width) to what the mixer takes, by name: (..., 1, head_dim) and gates."""
        q, k, v = (each.unsqueeze(-2) for each in self.qkv_proj(x).chunk(3, -1))
        given: dict[str, Any] = {"q": q, "k": k, "v": v}
        if self.mixer in ("deltanet", "gated_deltanet"):
            given = {"q": l2_norm(q), "k": l2_norm(k), "v": v}
            given["beta"] = self.gates.beta_proj(x).sigmoid()
        if self.gated or self.mixer in ("mamba2", "gated_deltanet", "log_linear"):
            step, given["log_decay"] = self.gates.decay(x)
            if self.mixer in ("mamba2", "log_linear"):
                given["v"] = v * step.unsqueeze(-1)
        if self.mixer == "log_linear":
            given["level_weights"] = self.gates.level_weights(x)
        return given

    def _keys_and_values(self, k: Tensor, v: Tensor) -> KeysAndValues:
        more = self.horizon - k.shape[2]
        keys, values = (F.pad(each, (0, 0, 0, more)) for each in (k, v))
        return KeysAndValues(keys, values, k.shape[2])


def state_bytes(state: State) -> int:
    """Count what a state keeps."""
    if isinstance(state, SMatState):
        return state.num_bytes
    if isinstance(state, KeysAndValues):
        return state.keys.nbytes + state.values.nbytes
    return state.nbytes if isinstance(state, Tensor) else state.buckets.nbytes
