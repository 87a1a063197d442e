"""The packed sequences of a call, one after the other, for backends that work them off so."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from torch import Tensor

from smat.masks import SMatMask
from smat.ops.smat.routing import Gates, Inputs, Options, Routing


def cut_sequences(inputs: Inputs, options: Options) -> Iterator[tuple[slice, Inputs, SMatMask]]:
    """Yield the packed sequences, or the one there is: their places, tensors and masks."""
    length = inputs.k.shape[1]
    if inputs.cu_seqlens is None:
        if length:
            yield slice(0, length), inputs, options.mask
        return
    for start, stop in itertools.pairwise(inputs.cu_seqlens.tolist()):
        if stop > start:
            here = slice(start, stop)
            yield here, _take(inputs, here), options.mask.for_length(stop - start)


def _take(inputs: Inputs, tokens: slice) -> Inputs:
    """View some tokens."""
    gates, routing = ([take(x, tokens) for x in kind] for kind in (inputs.gates, inputs.routing))
    q, k, v = (x[:, tokens] for x in (inputs.q, inputs.k, inputs.v))
    return Inputs(q, k, v, Gates(*gates), Routing(*routing))


def take(x: Tensor | None, tokens: slice) -> Tensor | None:
    """View some tokens of what may not be there."""
    return None if x is None else x[:, tokens]
