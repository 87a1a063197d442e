"""Mixture of memories: a router sends each token to a few of many gated delta-rule memories.

The whole-mixer baseline of joint recall (appendix, Table "mom_macro"), derived from MoM: top-k of a
softmax router, renormalised, no shared memory, and Gated DeltaNet's update in every memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

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
from smat.layers.short_convolution import ShortConvolution

SPARE_VISITS = 8  # of padding behind a sequence, which cost no more than another product


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
    runs_over_ranks = False  # each memory has a sequence of its own, cut elsewhere

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
        self.widths = [num_heads * head_dim, num_heads * value_dim, num_heads, num_heads]
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

    def _mix_unpacked(
        self, hidden_states: Tensor, cu_seqlens: Tensor, use_cache: bool, extras: Mapping[str, Any]
    ) -> tuple[Tensor, MixerCache | None]:
        if len(self.routers) > 1:
            lengths = [int(length) for length in self.routers]
            raise ValueError(f"pad packed sequences: {len(lengths)} routers are for {lengths}")
        return super()._mix_unpacked(hidden_states, cu_seqlens, use_cache, extras)

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
        router = next((each for each in lengths if each >= call.length), lengths[-1])
        if call.past is not None:
            router = int(call.past["router"][0])
        memory, weight = self._route(x, router, call)
        q, q_conv = self.q_conv.run(self.q_proj(x), call, "q_conv")
        q = l2_norm(q.unflatten(-1, (self.num_heads, -1)))
        states = self._states(x, call)
        visits = Visits(memory, self.num_memories, call.real)
        found = q.new_zeros(*memory.shape, self.num_heads, self.value_dim)
        if len(visits.token):
            visitors = visits.project(x, self.bank)
            sequences = list(visits.sequences())
            answers = [self._recur(q, visitors, visits, each, states) for each in sequences]
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
            self.balance_loss = _balance_loss(probability, memory, call.real)
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
        gone = some.padding.unsqueeze(-1)
        # Behind a sequence stand visitors of another, whose numbers need not be finite.
        own = visitors[some.place].masked_fill(gone, 0)
        inputs, raw_beta, raw_step = own.split([sum(self.widths[:2]), *self.widths[2:]], -1)
        k, v = self.kv_conv(inputs, before[0]).split(self.widths[:2], -1)
        k, v = (each.unflatten(-1, (self.num_heads, -1)) for each in (k, v))
        parameters = (each[some.memory].unsqueeze(1) for each in (self.dt_bias, self.A_log))
        _, log_decay = step_and_log_decay(raw_step, *parameters)
        beta, log_decay = (x.masked_fill(gone, 0) for x in (raw_beta.sigmoid(), log_decay))
        q = q.flatten(0, 1)[visits.token[some.place]]
        tokens = DeltaTokens(q, l2_norm(k), v, beta, log_decay)
        out, state = run_delta_rule(tokens, before[1], states is not None, self.chunk_size)
        if states is not None:
            assert state is not None
            conv = self.kv_conv.next_state(inputs.detach(), before[0], some.lengths)
            states[0][where], states[1][where] = conv.to(states[0].dtype), state.detach()
        return out


class Sequences(NamedTuple):
    """Sequences of about the same length, side by side."""

    memory: Tensor  # (n,)
    row: Tensor  # (n,), of the batch
    lengths: Tensor  # (n,)
    place: Tensor  # (n, L), of each token among the sorted visits
    padding: Tensor  # (n, L), True behind the last token of a sequence


class Visits:
    """Tokens (B, T) that visit k memories each, ``memory`` (B, T, k), in the order of their time.

    >>> visits = Visits(torch.tensor([[[0, 1], [1, 2], [1, 0]]]), num_memories=3)
    >>> visits.token, [some.lengths.tolist() for some in visits.sequences()]
    (tensor([0, 2, 0, 1, 2, 1]), [[3, 2, 1]])

    Visits are sorted by memory, then batch row, then time: those of a memory stand together for its
    projections, and those of a memory and row are a sequence. Padding, which stands behind the real
    tokens of a row, visits nothing. All work is O(T k), however unevenly memories are visited.
    """

    def __init__(self, memory: Tensor, num_memories: int, real: Tensor | None = None) -> None:
        self.batch, _, self.num_reads = memory.shape
        self.num_memories, self.device = num_memories, memory.device
        num_sequences = num_memories * self.batch
        row = torch.arange(self.batch, device=self.device)
        entry = memory * self.batch + row[:, None, None]
        if real is not None:
            entry = entry.masked_fill(~real.unsqueeze(-1), num_sequences)
        entry = entry.flatten()
        self.counts = torch.bincount(entry, minlength=num_sequences + 1)[:num_sequences]
        num_visits = len(entry) if real is None else int(self.counts.sum())
        self.order = entry.argsort(stable=True)[:num_visits]
        self.token = self.order // self.num_reads
        self.num_tokens = memory.shape[0] * memory.shape[1]

    def project(self, x: Tensor, bank: Tensor) -> Tensor:
        """Multiply every visitor (B, T, f) by its memory's matrix (M, f, g): sorted, (V, g)."""
        per_memory = self.counts.view(self.num_memories, -1).sum(1).tolist()
        visitors = x.flatten(0, 1)[self.token].split(per_memory)
        pairs = zip(visitors, bank.to(x.dtype).unbind(), strict=True)
        return torch.cat([some @ matrix for some, matrix in pairs if len(some)])

    def sequences(self) -> Iterator[Sequences]:
        """Give the sequences that are not empty, side by side where padding costs little.

        Of those that stand together the shortest has three quarters of the longest one's length.
        """
        offset = self.counts.cumsum(0) - self.counts
        lengths, sequence = self.counts.sort(descending=True)
        sizes = lengths[lengths > 0].tolist()
        first = 0
        while first < len(sizes):
            width, last = sizes[first], first + 1
            while last < len(sizes) and sizes[last] >= min(0.75 * width, width - SPARE_VISITS):
                last += 1
            some, token = sequence[first:last], torch.arange(width, device=self.device)
            place = (offset[some].unsqueeze(1) + token).clamp(max=len(self.token) - 1)
            memory, row, count = some // self.batch, some % self.batch, self.counts[some]
            yield Sequences(memory, row, count, place, token >= count.unsqueeze(1))
            first = last

    def collect(self, sequences: list[Sequences], answers: list[Tensor]) -> Tensor:
        """Give what sequences (n, L, ...) say back to their tokens, (B T, k, ...), 0 at padding."""
        spare = self.num_tokens * self.num_reads  # the place of padding
        target = [self.order[x.place].masked_fill(x.padding, spare).flatten() for x in sequences]
        said = torch.cat([answer.flatten(0, 1) for answer in answers])
        found = said.new_zeros(spare + 1, *said.shape[1:]).index_copy(0, torch.cat(target), said)
        return found[:-1].unflatten(0, (-1, self.num_reads))


def _balance_loss(probability: Tensor, memory: Tensor, real: Tensor | None) -> Tensor:
    """M sum_m f_m p_m over the real tokens, with the gradient of p; 0 without any."""
    if real is not None:
        probability, memory = probability[real], memory[real]
    num_memories, visited = probability.shape[-1], memory.flatten()
    probability = probability.flatten(0, -2)
    visits = torch.bincount(visited, minlength=num_memories) / max(1, len(visited))
    mean = probability.sum(0) / max(1, len(probability))
    return num_memories * (visits.to(mean.dtype) * mean).sum()
