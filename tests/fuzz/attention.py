"""The op against the dense oracle, over everything that it takes, together."""

from dataclasses import dataclass
from typing import Any

import torch

import smat
from tests.ops.smat.comparison import (
    assert_close,
    attend,
    attend_at,
    attend_densely,
    make_inputs,
    mild_gates,
    mixed_gates,
    small_blocks,
)

LENGTHS = (1, 2, 3, 5, 7, 9, 16, 17, 23, 31, 33, 48, 65, 97)  # beside tiles of 4, 16 and 64
DTYPES = ("float64", "float32", "bfloat16", "float16")
FEATURES = {"softplus": torch.nn.functional.softplus}


@dataclass
class Call:
    """One drawn call: tensors, mask, options, and the op's block sizes."""

    inputs: dict[str, torch.Tensor]
    mask: smat.SMatMask
    options: dict[str, Any]
    tile: int = 16
    rows_only: bool = False  # by smat_attention_at


def draw_boundary(choices, seq_len):
    kind = choices.pick("boundary", ["default", "none", "kept", "rebuilt", "doubling", "window"])
    if kind == "kept":
        return smat.schedules.kept(choices.pick("kept", range(seq_len + 1)))
    if kind == "window":  # every step costs a tabulation
        steps = [step for step in (1, 2, 5, 8, 16, 30) if seq_len <= 40 * step]
        return smat.schedules.window(choices.pick("window", steps))
    return None if kind == "default" else getattr(smat.schedules, kind)()


def draw_mask(choices, seq_len):
    return smat.SMatMask(
        seq_len=seq_len + choices.pick("spare", [0, 0, 2, 50]),
        vc_dim=choices.pick("vc_dim", range(1, 6)),
        chunk_size=choices.pick("chunk_size", [1, 2, 5, 8, 16, 64]),
        field_size=choices.pick("field_size", [None, None, 2, 3, 5]),
        boundary=draw_boundary(choices, seq_len),
    )


def draw_layout(choices, seq_len, batch):
    """Draw padding on either side, packing, or neither."""
    layout = choices.pick("layout", ["plain", "plain", "padded", "packed"])
    if layout == "padded":
        return batch, {"attention_mask": draw_padding(choices, "row", batch, seq_len)}
    if layout == "packed":
        count = choices.pick("inner edges", range(5))
        inner = [choices.pick(f"edge {n}", range(seq_len + 1)) for n in range(count)]
        return 1, {"cu_seqlens": torch.tensor([0, *sorted(inner), seq_len])}
    return batch, {}


def draw_padding(choices, name, batch, length):
    real = torch.zeros(batch, length, dtype=torch.long)
    for place, row in enumerate(real):
        start = choices.pick(f"{name} {place} starts", range(length + 1))
        row[start : choices.pick(f"{name} {place} stops", range(length, start - 1, -1))] = 1
    return real


def draw_routing(choices, mask, shape, group, packed, generator):
    """Draw profiles and types by content, small enough for every packed sequence's geometry."""
    routing = {}
    batch, seq_len, heads = shape
    if choices.pick("profile", [False, True]):
        limit = 1 if packed else mask.geometry.num_profiles
        size = (batch, seq_len, heads * choices.pick("profile heads", sorted({1, group})))
        routing["profile"] = torch.randint(limit, size, generator=generator)
    if choices.pick("query_type", [False, True]):
        limit = 1 if packed else mask.geometry.num_types
        reads = choices.pick("reads", [(), (), (1,), (2,), (5,)])
        size = (batch, seq_len, heads * group, *reads)
        routing["query_type"] = torch.randint(limit, size, generator=generator)
        if choices.pick("read_weight", [False, True]):
            weight = torch.rand(size, generator=generator, dtype=torch.float64)
            routing["read_weight"] = 0.05 + weight
    return routing


def draw_gates(choices, shape, group, generator, kinds):
    """Draw gates, key gates and write weights, for each key head or for each query head."""
    batch, seq_len, heads = shape
    gates = {}

    def size(name):
        return (batch, seq_len, heads * choices.pick(f"{name} heads", sorted({1, group})))

    kind = choices.pick("gates", kinds)
    if kind != "none":
        make = mild_gates if kind == "mild" else mixed_gates
        gates["log_decay"] = make(size("log_decay"), seed=choices.pick("gate values", range(100)))
    for name in ("key_gate", "write_weight"):
        if choices.pick(name, [False, True]):
            gates[name] = 0.05 + torch.rand(size(name), generator=generator, dtype=torch.float64)
    return gates


def draw_tensors(choices, mask, batch, seq_len, options, dtype):
    """Draw q, k, v, and what goes with each token."""
    packed = "cu_seqlens" in options
    heads, group = choices.pick("heads", [1, 2]), choices.pick("group", [1, 1, 2, 3])
    seed = choices.pick("values", range(1000))
    generator = torch.Generator().manual_seed(seed)
    sharing = choices.pick("sharing", ["queries", "values"])
    inputs = make_inputs(seq_len, batch=batch, heads=heads, group=group, seed=seed, sharing=sharing)
    shape = (batch, seq_len, heads)
    # Without the query's own key, all weights of a row may be too small to be divided by.
    vanish = options["branch"] == "long_range" and options["normalize"]
    inputs |= draw_gates(choices, shape, group, generator, ["none", "mild", "mixed"][: 3 - vanish])
    inputs |= draw_routing(choices, mask, shape, group, packed, generator)
    return {name: x.to(dtype) if x.is_floating_point() else x for name, x in inputs.items()}


def draw_options(choices):
    """Draw what the op and a state take beside tensors."""
    normalize = choices.pick("normalize", [True, False])
    features = ["elu", "favor", "softplus", *([] if normalize else ["identity", "relu"])]
    name = choices.pick("feature_map", features)
    return {
        "normalize": normalize,
        "feature_map": FEATURES.get(name, name),
        "decay_scope": choices.pick("decay_scope", ["all", "all", "recurrent"]),
        "branch": choices.pick("branch", ["both", "both", "both", "causal", "long_range"]),
    }


def draw_call(choices, dtype=None):
    """Draw a whole call of the op, in a dtype if that is given."""
    dtype = getattr(torch, dtype or choices.pick("dtype", DTYPES))
    # Of a single token every gradient but that of v is 0, which only fp64 tells from rounding.
    shortest = 1 if dtype == torch.float64 else 2
    seq_len = choices.pick("seq_len", [length for length in LENGTHS if length >= shortest])
    batch, options = draw_layout(choices, seq_len, choices.pick("batch", [1, 2]))
    mask = draw_mask(choices, seq_len)
    options |= draw_options(choices)
    inputs = draw_tensors(choices, mask, batch, seq_len, options, dtype)
    rows_only = False
    if choices.pick("positions", [False, True]):
        count = choices.pick("rows", range(10))
        rows = [choices.pick(f"position {n}", range(seq_len)) for n in range(count)]
        rows_only = choices.pick("rows_only", [False, True]) and "attention_mask" not in options
        if rows_only and dtype.itemsize == 2:
            # The caller adds up gradients of rows that were rounded to half precision each.
            rows = list(dict.fromkeys(rows))
        options["positions"] = torch.tensor(rows, dtype=torch.long)
    tile = choices.pick("tile", [64, 16, 4])
    return Call(inputs, mask, options, tile, rows_only)


def check_call(call):
    """Compare the op with the oracle: output and every gradient."""
    run = attend_at if call.rows_only else attend
    with small_blocks(tile=call.tile):
        found = run(call.inputs, call.mask, **call.options)
    assert_close(found, attend_densely(call.inputs, call.mask, **call.options), found[0].dtype)


def attention(choices):
    """Run `smat_attention` or `smat_attention_at` on a drawn call, and the oracle on the same."""
    check_call(draw_call(choices))
