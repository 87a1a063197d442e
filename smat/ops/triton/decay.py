"""Products of decay gates as exponentials of differences, for kernels (lemma "Gated SMat").

Running sums are taken in fp64 and handed on as two fp32 numbers, which hold 48 bits: a difference
of sums near 1e6 still has an absolute error of 1e-8. The torch form is `smat.ops.linear.decay`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from smat.ops.linear.decay import FORGETS


def sum_gates(log_decay: Tensor) -> Tensor:
    """Sum gates (B, T, H): (2, B, H, T + 1), the sums' leading digits and what these leave out.

    >>> sum_gates(torch.tensor([[[-1.0], [-float("inf")]]]))[0].tolist()
    [[[0.0, -1.0, -1001.0]]]

    Entry t sums the first t gates, so that exp(sums[i] - sums[j]) is what is left after i tokens of
    what was written after j. Time may be sliced: only differences matter.
    """
    gates = log_decay.transpose(1, 2).double().clamp(min=FORGETS)
    total = F.pad(gates.cumsum(-1), (1, 0))
    coarse = total.float()
    return torch.stack([coarse, (total - coarse).float()])


@triton.jit
def left_between(coarse_later, fine_later, coarse_earlier, fine_earlier):
    """Multiply the gates between two numbers of tokens: exp of a difference of at most 0."""
    difference = (coarse_later - coarse_earlier) + (fine_later - fine_earlier)
    return tl.exp(tl.minimum(difference, 0.0))
