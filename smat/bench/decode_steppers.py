"""Decoders that stand at the end of a context and take one token at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

import smat
from smat.bench.decode_config import SOFTMAX, DecodeConfig, Decoder
from smat.bench.workload import DTYPES, Inputs, Shape

if TYPE_CHECKING:
    from smat.ops.decode import SMatState

NUM_TOKENS = 32  # different tokens that are fed in turn
EXTENDED_AT_ONCE = 4096


@dataclass
class Stepper:
    """A decoder with its state, which a step replaces."""

    step: Callable[[], object]
    num_bytes: int


def make_stepper(config: DecodeConfig, decoder: Decoder, device: torch.device) -> Stepper:
    """Fill a state up to the context, and make a step that feeds it random tokens for ever."""
    dtype = DTYPES[config.dtype]
    shape = Shape(NUM_TOKENS, config.heads, config.key_dim, config.value_dim, decoder.batch)
    tokens = Inputs.random(shape, dtype, device, backward=False, seed=2)
    if decoder.kind == SOFTMAX:
        return _softmax_stepper(config, decoder, tokens)
    state = fill_state(config, decoder, device)
    count = 0

    def step() -> Tensor:
        nonlocal state, count
        t = count % NUM_TOKENS
        count += 1
        out, state = state.step(tokens.q[:, t], tokens.k[:, t], tokens.v[:, t], inplace=True)
        return out

    return Stepper(step, state.num_bytes)


def fill_state(config: DecodeConfig, decoder: Decoder, device: torch.device) -> SMatState:
    """Take in random keys and values, the same for all sequences of the batch."""
    length, added = decoder.prefilled(config)
    mask = decoder.variant(config).mask(decoder.horizon(config), config.chunk_size)
    last = torch.tensor([length - 1], device=device)
    prompt = _random_tokens(config, length, device, seed=3)
    _, state = smat.smat_attention(
        prompt.q, prompt.k, prompt.v, mask, positions=last, output_final_state=True
    )
    assert state is not None
    for start in range(0, added, EXTENDED_AT_ONCE):
        count = min(EXTENDED_AT_ONCE, added - start)
        turn = _random_tokens(config, count, device, seed=4 + start)
        _, state = state.extend(turn.q, turn.k, turn.v, inplace=True)
    return state if decoder.batch == 1 else state.repeat_interleave(decoder.batch)


def _random_tokens(config: DecodeConfig, length: int, device: torch.device, seed: int) -> Inputs:
    shape = Shape(length, config.heads, config.key_dim, config.value_dim)
    return Inputs.random(shape, DTYPES[config.dtype], device, backward=False, seed=seed)


def _softmax_stepper(config: DecodeConfig, decoder: Decoder, tokens: Inputs) -> Stepper:
    """Softmax attention with keys and values preallocated to the last token."""
    length = decoder.context + config.steps
    sizes = decoder.batch, config.heads, length
    keys = tokens.k.new_empty(*sizes, config.key_dim).normal_()
    values = tokens.v.new_empty(*sizes, config.value_dim).normal_()
    count = 0

    def step() -> Tensor:
        nonlocal count
        t, place = count % NUM_TOKENS, decoder.context + count
        count += 1
        keys[:, :, place], values[:, :, place] = tokens.k[:, t], tokens.v[:, t]
        seen = slice(0, place + 1)
        query = tokens.q[:, t].unsqueeze(2)
        return F.scaled_dot_product_attention(query, keys[:, :, seen], values[:, :, seen])

    return Stepper(step, (keys.numel() + values.numel()) * keys.element_size())
