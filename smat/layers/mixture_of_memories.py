"""Mixture of memories: a router sends each token to a few of many gated delta-rule memories.

The whole-mixer baseline of joint recall (appendix, Table "mom_macro"), derived from MoM: top-k of a
softmax router, renormalised, no shared memory, and Gated DeltaNet's update in every memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from smat.distributed import HeadRanks, Share
from smat.distributed.exchange import scan_rows, total, without_autocast
from smat.layers.call import CallInfo, MixerCache
from smat.layers.gated_deltanet import run_delta_rule
from smat.layers.memory.transport import DeltaTokens
from smat.layers.mixer import Mixer
from smat.layers.primitives import (
    NormThenGate,
    expanded,
    init_decay_rate_,
    init_step_bias_,
    l2_norm,
    step_and_log_decay,
)
from smat.layers.short_convolution import ShortConvolution, last_inputs
from smat.layers.visits import Sequences, Visits
from smat.ops.delta_rule import delta_rule, transport_queries


class MixtureOfMemories(Mixer):
    """Many small memories, of which each token updates and reads a few.

    >>> layer = MixtureOfMemories(hidden_size=32, num_memories=6, num_heads=2, head_dim=8)
    >>> x = torch.randn(2, 50, 32)
    >>> out, _, cache = layer(x, use_cache=True)
    >>> out_t, cache = layer.step(torch.randn(2, 32), cache)
    >>> out_t.shape, cache["state"].shape
    (torch.Size([2, 32]), torch.Size([2, 6, 2, 8, 8]))

    For each of the k memories m that the router chooses for a token,
    S_m <- a (I - beta k k') S_m + beta k v',  and  y = sum over them of w_m K^(-1/2) S_m' q,
    with w the router's softmax over the chosen ones. Queries, norm and output are shared; k, v,
    beta and a are projections of the memory's own. Keys and values are convolved along the tokens
    that their memory receives, queries along all tokens. O(T k) work, not a scan for each memory.

    Args:
        hidden_size: The width of the layer's input and output.
        num_memories: How many there are; or, by sequence length, how many of the first memories a
            router of its own for that length may choose. A call takes the router of the shortest
            length that holds it, the longest one past all; decoding keeps to it.
        num_chosen: k, the memories that a token updates and reads.
        num_heads, head_dim, expand_v, conv_size, norm_eps, chunk_size: As in Gated DeltaNet.

    After a call that begins sequences `balance_loss` holds M sum over m of f_m p_m, f the fraction
    of the visits and p the mean probability: 1 if memories are used evenly.
    """

    balance_loss: Tensor | None

    def __init__(
        self,
        hidden_size: int,
        num_memories: int | Mapping[int, int],
        *,
        num_chosen: int = 4,
        num_heads: int = 4,
        head_dim: int = 16,
        expand_v: float = 1.0,
        conv_size: int = 4,
        norm_eps: float = 1e-5,
        chunk_size: int = 64,
        layer_idx: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(layer_idx)
        by_length = {0: num_memories} if isinstance(num_memories, int) else dict(num_memories)
        if not by_length or min(by_length.values()) < num_chosen or num_chosen < 1:
            raise ValueError(f"a token cannot choose {num_chosen} of {num_memories} memories")
        value_dim = expanded(head_dim, expand_v)
        self.hidden_size, self.num_heads, self.num_chosen = hidden_size, num_heads, num_chosen
        self.head_dim, self.value_dim, self.chunk_size = head_dim, value_dim, chunk_size
        self.num_memories = max(by_length.values())
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        self.routers = nn.ModuleDict()
        for length, count in sorted(by_length.items()):
            self.routers[str(length)] = nn.Linear(hidden_size, count, bias=False, **made)
        self.q_proj = nn.Linear(hidden_size, self.widths[0], bias=False, **made)
        self.q_conv = ShortConvolution(self.widths[0], conv_size, **made)
        shape = (self.num_memories, hidden_size, sum(self.widths))
        self.bank = nn.Parameter(torch.empty(shape, **made))  # [k, v, beta, decay] of each memory
        self.kv_conv = ShortConvolution(sum(self.widths[:2]), conv_size, **made)
        self.dt_bias = nn.Parameter(torch.empty(self.num_memories, num_heads, **made))
        self.A_log = nn.Parameter(torch.empty(self.num_memories, num_heads, **made))
        self.g_proj = nn.Linear(hidden_size, self.widths[1], bias=False, **made)
        self.norm = NormThenGate(value_dim, norm_eps, **made)
        self.o_proj = nn.Linear(self.widths[1], hidden_size, bias=False, **made)
        self.balance_loss = None
        self.reset_parameters()

    def _check(self, x: Tensor, real: Any, past: Any, cu_seqlens: Any, *others: Any) -> None:
        super()._check(x, real, past, cu_seqlens, *others)
        if cu_seqlens is not None and len(self.routers) > 1:
            lengths = [int(length) for length in self.routers]
            raise ValueError(f"pad packed sequences: {len(lengths)} routers are for {lengths}")

    @property
    def widths(self) -> list[int]:
        """Of keys, values, write strengths and decays."""
        return [self.num_heads * each for each in (self.head_dim, self.value_dim, 1, 1)]

    def cut_heads(self, ranks: HeadRanks) -> None:
        heads = self.num_heads
        own, segments = ranks.own(heads), [(width, heads) for width in self.widths]
        ranks.share(*self.routers.values(), self.norm)
        ranks.cut(self, *segments, names=["bank"], dim=2)
        ranks.cut(self, (heads, heads), names=["dt_bias", "A_log"], dim=1)
        ranks.cut(self.kv_conv, *segments[:2])
        for module in (self.q_proj, self.q_conv):
            ranks.cut(module, segments[0])
        ranks.cut(self.g_proj, segments[1])
        ranks.add_up(self.o_proj, heads)
        self.num_heads = own

    def reset_parameters(self) -> None:
        super().reset_parameters()
        bound = self.hidden_size**-0.5  # as torch draws a linear layer
        nn.init.uniform_(self.bank, -bound, bound)
        init_step_bias_(self.dt_bias)
        init_decay_rate_(self.A_log, 0.0, 16.0)

    def __getstate__(self) -> dict[str, Any]:
        """Leave the last loss behind where a layer is copied or saved: it belongs to a graph."""
        return {**self.__dict__, "balance_loss": None}

    def mix(self, x: Tensor, call: CallInfo) -> tuple[Tensor, MixerCache | None]:
        lengths = sorted(int(length) for length in self.routers)
        router = next((each for each in lengths if each >= call.total_length), lengths[-1])
        if call.past is not None:
            router = int(call.past["router"][0])
        memory, weight = self._route(x, router, call)
        q, q_conv = self.q_conv.run(self.q_proj(x), call, "q_conv")
        q = l2_norm(q.unflatten(-1, (self.num_heads, -1)))
        visits = Visits(memory, self.num_memories, call.real)
        found = q.new_zeros(*memory.shape, self.num_heads, self.value_dim)
        states = self._states(x, call) if call.share is None else None
        if len(visits.token):
            visitors = visits.project(x, self.bank)
            sequences = list(visits.sequences())
            if call.share is None:
                answers = [self._recur(q, visitors, visits, each, states) for each in sequences]
            else:
                answers, states = self._recur_over_ranks(q, visitors, visits, sequences, call)
            found = visits.collect(sequences, answers).view(found.shape)  # (B, T, k, H, V)
        y = (found * weight.to(found.dtype)[..., None, None]).sum(2)
        out = self.o_proj(self.norm(y, self.g_proj(x).view_as(y)).flatten(-2))
        if states is None or not call.use_cache:
            return out, None
        number = torch.full((len(x),), router, device=x.device)
        return out, call.cache(q_conv=q_conv, kv_conv=states[0], state=states[1], router=number)

    def _route(self, x: Tensor, router: int, call: CallInfo) -> tuple[Tensor, Tensor]:
        """Choose memories (B, T, k), and weigh them, (B, T, k)."""
        scores = self.routers[str(router)](x)
        probability = scores.to(torch.promote_types(scores.dtype, torch.float32)).softmax(-1)
        chosen, memory = probability.topk(self.num_chosen, dim=-1)
        if call.past is None:
            loss = _balance_loss(probability, memory, call.real, call.share)
            self.balance_loss = loss if self.ranks is None else self.ranks.mean(loss)
        return memory, call.close(chosen / chosen.sum(-1, keepdim=True))

    def _states(self, x: Tensor, call: CallInfo) -> tuple[Tensor, Tensor] | None:
        """Return the states of all memories' convolutions and recurrences, to be overwritten."""
        if call.past is not None:
            kept = call.past["kv_conv"], call.past["state"]
            return kept if call.inplace else (kept[0].clone(), kept[1].clone())
        if not call.use_cache:
            return None
        each = (len(x), self.num_memories)
        wide = torch.promote_types(x.dtype, torch.float32)
        matrix = (self.num_heads, self.head_dim, self.value_dim)
        conv = x.new_zeros(*each, self.kv_conv.width - 1, sum(self.widths[:2]))
        return conv, x.new_zeros(*each, *matrix, dtype=wide)

    def _recur(
        self,
        q: Tensor,
        visitors: Tensor,
        visits: Visits,
        some: Sequences,
        states: tuple[Tensor, Tensor] | None,
    ) -> Tensor:
        """Let memories take in the sequences of tokens that visit them: (n, L, H, V)."""
        where = some.row, some.memory
        before = (None, None) if states is None else (states[0][where], states[1][where])
        inputs, tokens = self._tokens(q, visitors, visits, some, before[0])
        out, state = run_delta_rule(tokens, before[1], states is not None, self.chunk_size)
        if states is not None:
            assert state is not None
            conv = self.kv_conv.next_state(inputs.detach(), before[0], some.lengths)
            states[0][where], states[1][where] = conv.to(states[0].dtype), state.detach()
        return out

    def _tokens(
        self, q: Tensor, visitors: Tensor, visits: Visits, some: Sequences, before: Tensor | None
    ) -> tuple[Tensor, DeltaTokens]:
        """Convolve the sequences after the inputs `before`: what was convolved, and the tokens."""
        gone = some.padding.unsqueeze(-1)
        # Behind a sequence stand visitors of another, whose numbers need not be finite.
        own = visitors[some.place].masked_fill(gone, 0)
        inputs, raw_beta, raw_step = own.split([sum(self.widths[:2]), *self.widths[2:]], -1)
        k, v = self.kv_conv(inputs, before).split(self.widths[:2], -1)
        k, v = (each.unflatten(-1, (self.num_heads, -1)) for each in (k, v))
        parameters = (each[some.memory].unsqueeze(1) for each in (self.dt_bias, self.A_log))
        _, log_decay = step_and_log_decay(raw_step, *parameters)
        beta, log_decay = (x.masked_fill(gone, 0) for x in (raw_beta.sigmoid(), log_decay))
        q = q.flatten(0, 1)[visits.token[some.place]]
        return inputs, DeltaTokens(q, l2_norm(k), v, beta, log_decay)

    @without_autocast
    def _recur_over_ranks(
        self,
        q: Tensor,
        visitors: Tensor,
        visits: Visits,
        sequences: Sequence[Sequences],
        call: CallInfo,
    ) -> tuple[list[Tensor], tuple[Tensor, Tensor]]:
        """Do so where other ranks hold earlier visitors: what each says, and the states after.

        First come the last inputs of every memory's convolution, n visits of which shift them by n;
        then its state, which the transitions of this rank's visits carry on.
        """
        assert call.share is not None
        past, each = self.kv_conv.width - 1, (visits.batch, self.num_memories)
        where = [(some.row, some.memory) for some in sequences]
        convolved = visitors[:, : sum(self.widths[:2])]
        written = convolved.new_zeros(*each, past, convolved.shape[-1])
        for some, at in zip(sequences, where, strict=True):
            inputs = convolved[some.place].masked_fill(some.padding.unsqueeze(-1), 0)
            written = written.index_put(at, last_inputs(inputs, past, lengths=some.lengths))
        tap = torch.arange(past, device=q.device)
        shift = tap == (visits.counts.view(self.num_memories, -1).t()[..., None] + tap)[..., None]
        shift = shift.to(written.dtype)
        (came,), link = scan_rows([(written, shift)], call.share, call.rows)
        conv = (written + shift @ came).detach()

        matrix = (self.num_heads, self.head_dim, self.value_dim)
        wide = torch.promote_types(q.dtype, torch.float32)
        written = q.new_zeros(*each, *matrix, dtype=wide)
        step = torch.eye(self.head_dim, dtype=wide, device=q.device).expand(
            *each, matrix[0], -1, -1
        )
        own, queries = [], []
        for some, at in zip(sequences, where, strict=True):
            _, tokens = self._tokens(q, visitors, visits, some, came[at] + link)
            out, state = delta_rule(*tokens, output_final_state=True, chunk_size=self.chunk_size)
            carried, transition = transport_queries(
                tokens.q, tokens.k, tokens.beta, tokens.log_decay, output_final_transition=True,
                chunk_size=self.chunk_size,
            )  # fmt: skip
            assert state is not None
            assert transition is not None
            written, step = written.index_put(at, state), step.index_put(at, transition)
            own.append(out)
            queries.append(carried)
        (before,), link = scan_rows([(written, step)], call.share, call.rows)
        read = (
            torch.einsum("nlhk,nhkv->nlhv", carried.to(wide), before[at])
            for carried, at in zip(queries, where, strict=True)
        )
        answers = [out + (x + link).to(out.dtype) for out, x in zip(own, read, strict=True)]
        return answers, (conv, (written + step @ before).detach())


def _balance_loss(
    probability: Tensor, memory: Tensor, real: Tensor | None, share: Share | None
) -> Tensor:
    """M sum_m f_m p_m over the real tokens of all ranks, with the gradient of p; 0 without any."""
    if real is not None:
        probability, memory = probability[real], memory[real]
    num_memories, visited = probability.shape[-1], memory.flatten()
    probability = probability.flatten(0, -2)
    visits = torch.bincount(visited, minlength=num_memories).to(probability.dtype)
    visits, mass = total(torch.stack([visits, probability.sum(0)]), share).unbind()
    count = visits.sum().clamp(min=1)
    return num_memories * memory.shape[-1] * (visits / count * mass / count).sum()
