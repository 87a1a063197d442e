"""Log-linear attention as a layer: a weight of the query's own for every level of the past.

Both forms are their backbone with another recurrence: everything else is inherited.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smat.distributed import HeadRanks
from smat.layers.call import CallInfo, take_step
from smat.layers.gated_deltanet import GatedDeltaNet
from smat.layers.mamba2 import Mamba2
from smat.layers.memory.transport import DeltaTokens
from smat.layers.primitives import keep_from_decay_
from smat.ops.log_linear import (
    LogLinearState,
    log_linear_attention,
    log_linear_delta_rule,
    log_linear_step,
)
from smat.ops.log_linear.over_ranks import LogLinearTokens, log_linear_over_ranks


class LevelWeights(nn.Module):
    """softplus(L * (W x)): one weight for every level of every head.

    >>> LevelWeights(hidden_size=8, num_heads=2, num_levels=5)(torch.randn(1, 3, 8)).shape
    torch.Size([1, 3, 2, 5])

    L starts at 1, so that small projections start near ln 2. All levels are told apart up to
    2^(num_levels - 1) tokens; beyond, the last weight serves everything older.
    """

    def __init__(
        self, hidden_size: int, num_heads: int, num_levels: int, bias: bool = False, **made: Any
    ) -> None:
        super().__init__()
        self.num_heads, self.num_levels = num_heads, num_levels
        self.proj = nn.Linear(hidden_size, num_heads * num_levels, bias=bias, **made)
        self.scale = nn.Parameter(torch.empty(num_heads, num_levels, **made))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.proj.reset_parameters()
        keep_from_decay_(nn.init.ones_(self.scale))

    def cut_heads(self, ranks: HeadRanks) -> None:
        ranks.cut(self.proj, (self.num_heads * self.num_levels, self.num_heads))
        ranks.cut(self, (self.num_heads, self.num_heads))
        self.num_heads = ranks.own(self.num_heads)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, hidden_size) -> (B, T, H, levels), positive."""
        raw = self.proj(x).unflatten(-1, (self.num_heads, self.num_levels))
        return F.softplus(raw * self.scale.to(raw.dtype))


class LogLinearMamba2(Mamba2):
    """Mamba-2 with a state for every power of two of the past.

    >>> layer = LogLinearMamba2(hidden_size=32, head_dim=16, state_dim=8, num_levels=8)
    >>> out, _, cache = layer(torch.randn(2, 50, 32), use_cache=True)
    >>> out_t, cache = layer.step(torch.randn(2, 32), cache)
    >>> out_t.shape, cache["state"].buckets.shape
    (torch.Size([2, 32]), torch.Size([2, 4, 7, 8, 16]))

    y_t = sum over s <= t of w_t[level(t, s)] exp(G_t - G_s) (C_t . B_s) step_s x_s, the level being
    bit_length(t XOR s). Its published form has projections with bias, a convolution without, and
    decay rates 1, ..., H.
    """

    packs_natively = False  # levels count from the start of each sequence
    reads_at_queries = False

    def __init__(
        self,
        hidden_size: int,
        *,
        num_levels: int = 15,
        conv_bias: bool = False,
        bias: bool = True,
        chunk_size: int = 64,
        **options: Any,
    ) -> None:
        if options.get("memory") is not None:
            raise ValueError("log-linear attention has no reset, and takes no memory beside it")
        super().__init__(hidden_size, conv_bias=conv_bias, bias=bias, **options)
        made = {"device": options.get("device"), "dtype": options.get("dtype")}
        self.chunk_size = chunk_size
        self.level_weights = LevelWeights(hidden_size, self.num_heads, num_levels, bias, **made)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        rates = torch.arange(1.0, self.num_heads + 1, device=self.A_log.device)
        with torch.no_grad():
            keep_from_decay_(self.A_log.copy_(rates.log()))

    def cut_heads(self, ranks: HeadRanks) -> None:
        super().cut_heads(ranks)
        self.level_weights.cut_heads(ranks)

    def recur(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, step: Tensor, log_decay: Tensor,
        call: CallInfo,
    ) -> tuple[Tensor, dict[str, Any]]:  # fmt: skip
        q, k = (each.repeat_interleave(self.num_heads // self.num_groups, 2) for each in (q, k))
        given = {"level_weights": self.level_weights(x), "log_decay": call.close(log_decay)}
        if call.past is not None:
            y, last = _decode(call, 1.0, q, k, v, **given)
            return y, {"state": last, "routing": None}
        if call.share is not None:
            tokens, sizes = LogLinearTokens(q, k, v, **given), {"chunk_size": self.chunk_size}
            y, last = log_linear_over_ranks(tokens, call.share, call.rows, scale=1.0, **sizes)
            return y, {"state": last, "routing": None}
        y, state = log_linear_attention(
            q, k, v, **given, output_final_state=call.use_cache, lengths=call.lengths,
            chunk_size=self.chunk_size,
        )  # fmt: skip
        return y, {"state": state, "routing": None}


class LogLinearGatedDeltaNet(GatedDeltaNet):
    """Gated DeltaNet with a state for every power of two of the past.

    >>> layer = LogLinearGatedDeltaNet(hidden_size=32, num_heads=2, head_dim=8, num_levels=8)
    >>> layer(torch.randn(2, 50, 32))[0].shape
    torch.Size([2, 50, 32])

    y_t = sum over s <= t of w_t[level(t, s)] beta_s (q_t' A_t ... A_{s+1} k_s) v_s, the level being
    bit_length(t XOR s). Its published form has no scale K^(-1/2); `scale` sets one.
    """

    def __init__(
        self, hidden_size: int, *, num_levels: int = 15, scale: float = 1.0, **options: Any
    ) -> None:
        super().__init__(hidden_size, **options)
        made = {"device": options.get("device"), "dtype": options.get("dtype")}
        self.scale = scale
        self.level_weights = LevelWeights(hidden_size, self.num_heads, num_levels, False, **made)

    def cut_heads(self, ranks: HeadRanks) -> None:
        super().cut_heads(ranks)
        self.level_weights.cut_heads(ranks)

    def recur(self, x: Tensor, tokens: DeltaTokens, call: CallInfo) -> tuple[Tensor, Any]:
        given = {"level_weights": self.level_weights(x), **tokens._asdict()}
        if call.past is not None:
            return _decode(call, self.scale, **given)
        if call.share is not None:
            sizes = {"scale": self.scale, "chunk_size": self.chunk_size}
            return log_linear_over_ranks(LogLinearTokens(**given), call.share, call.rows, **sizes)
        return log_linear_delta_rule(
            **given, scale=self.scale, lengths=call.lengths, output_final_state=call.use_cache,
            chunk_size=self.chunk_size,
        )  # fmt: skip


def _decode(
    call: CallInfo, scale: float, *tokens: Tensor, **per_token: Tensor
) -> tuple[Tensor, LogLinearState]:
    """Take the tokens one by one after those of the cache; padding leaves its row as it was."""
    state: LogLinearState = call.before("state")
    outputs = []
    for t in range(call.length):
        step = partial(log_linear_step, state=state, scale=scale)
        out, after = take_step(step, t, *tokens, **per_token)
        if call.real is not None:
            real = call.real[:, t]
            buckets = torch.where(real.view(-1, 1, 1, 1, 1), after.buckets, state.buckets)
            after = LogLinearState(buckets, torch.where(real, after.num_tokens, state.num_tokens))
        outputs.append(out)
        state = after
    return torch.cat(outputs, 1), state
