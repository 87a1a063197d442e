"""States and layers: a sequence in any pieces against the whole."""

import itertools
import tempfile
from pathlib import Path

import torch

import smat
from tests.fuzz.attention import DTYPES, draw_mask, draw_options, draw_padding, draw_tensors
from tests.layers import mixers
from tests.ops.smat.comparison import TOLERANCE, assert_close, attend_densely, small_blocks
from tests.ops.smat.decoding import decode, prefill, span

WAYS = ("extend", "steps", "padded")


def draw_pieces(choices, batch, seq_len):
    """Cut a sequence: (start, stop, way to take them in, which tokens are real or None)."""
    count = choices.pick("cuts", range(5))
    cuts = sorted({choices.pick(f"cut {n}", range(1, max(2, seq_len))) for n in range(count)})
    edges = [0, *(cut for cut in cuts if cut < seq_len), seq_len]
    for place, (start, stop) in enumerate(itertools.pairwise(edges)):
        way = choices.pick(f"way {place}", WAYS)
        real = None
        if way == "padded":
            real = draw_padding(choices, f"piece {place} row", batch, stop - start)
        yield start, stop, way, real


def whole_padding(pieces, batch):
    """Say of every token of the whole whether it is real."""
    parts = [
        torch.ones(batch, stop - start, dtype=torch.long) if real is None else real
        for start, stop, _, real in pieces
    ]
    return torch.cat(parts, 1)


def saved_and_loaded(state, feature_map):
    with tempfile.TemporaryDirectory() as folder:
        state.save(Path(folder) / "state")
        custom = None if isinstance(feature_map, str) else feature_map
        return smat.SMatState.load(Path(folder) / "state", state.mask, custom)


def draw_sequence(choices):
    """Draw a mask, tensors and options for a state."""
    seq_len, batch = choices.pick("seq_len", range(3, 70)), choices.pick("batch", [1, 2, 3])
    mask = draw_mask(choices, seq_len)
    dtype = getattr(torch, choices.pick("dtype", ["float64", *DTYPES]))
    options = draw_options(choices)
    return mask, draw_tensors(choices, mask, batch, seq_len, options, dtype), options


def take_in(state, inputs, piece, inplace):
    """Take a piece into a state; the outputs, and the state after it."""
    start, stop, way, real = piece
    if way == "steps":
        return decode(state, inputs, start, stop, inplace)
    return state.extend(**span(inputs, start, stop), attention_mask=real, inplace=inplace)


def states(choices):
    """Prefill, extend and step through random pieces, saved and loaded between, as the whole."""
    mask, inputs, options = draw_sequence(choices)
    batch, seq_len = inputs["k"].shape[:2]
    pieces = list(draw_pieces(choices, batch, seq_len))
    inplace, saves = choices.pick("inplace", [False, True]), choices.pick("saves", [False, True])
    with torch.no_grad(), small_blocks(tile=choices.pick("tile", [64, 16, 4])):
        start, stop, _, real = pieces[0]
        out, state = prefill(span(inputs, start, stop), mask, attention_mask=real, **options)
        outs = [out]
        for piece in pieces[1:]:
            if saves:
                state = saved_and_loaded(state, options["feature_map"])
            out, state = take_in(state, inputs, piece, inplace)
            outs.append(out)
    padding = whole_padding(pieces, batch)
    assert state.positions == padding.sum(1).tolist()
    expected, _ = attend_densely(inputs, mask, attention_mask=padding, **options)
    assert_close((torch.cat(outs, 1), {}), (expected, {}), inputs["v"].dtype)


def layers(choices):
    """Every layer in random pieces, padded on either side, as each row's real tokens alone."""
    name = choices.pick("layer", list(mixers.LAYERS))
    longest = mixers.HORIZON if name == "softmax learned" else 2 * mixers.HORIZON
    length, batch = choices.pick("length", range(1, longest + 1)), choices.pick("batch", [1, 2, 3])
    # Where numbers choose cells, rounding may choose others.
    narrow = [] if name in mixers.ROUNDING_ROUTES else ["float32"]
    dtype = getattr(torch, choices.pick("dtype", ["float64", *narrow]))
    layer = mixers.make(name, dtype, seed=choices.pick("weights", range(50)))
    x, ids = mixers.tokens(batch, length, dtype, seed=choices.pick("values", range(1000)))
    pieces = list(draw_pieces(choices, batch, length))
    padding = whole_padding(pieces, batch).bool()
    x = x.masked_fill(~padding.unsqueeze(-1), torch.nan)
    cache, outs = None, []
    with torch.no_grad():
        for piece in pieces:
            out, cache = mix_piece(layer, x, ids, piece, cache)
            outs.append(out)
        found = torch.cat(outs, 1)
        assert cache.num_tokens.tolist() == padding.sum(1).tolist()
        assert not found[~padding].any()
        for row, real in enumerate(padding):
            if real.any():
                given = mixers.extras(layer, ids[row : row + 1, real])
                alone = layer(x[row : row + 1, real], **given)[0][0]
                error = mixers.relative_rms(found[row, real], alone)
                assert error < 100 * TOLERANCE[dtype][0], f"row {row}: relative RMS {error}"


def mix_piece(layer, x, ids, piece, cache):
    """Take a piece by a layer; the outputs, and the cache after it."""
    start, stop, way, real = piece
    if way != "steps":
        given = mixers.extras(layer, ids[:, start:stop])
        out, _, cache = layer(x[:, start:stop], real, cache, True, **given)
        return out, cache
    outs = []
    for t in range(start, stop):
        out, cache = layer.step(x[:, t], cache, **mixers.extras(layer, ids[:, t]))
        outs.append(out.unsqueeze(1))
    return torch.cat(outs, 1), cache
