"""Valid calls with one argument broken: each ends in an error that says what the caller gave."""

import math
import re
from functools import partial

import torch

import smat
from smat.layers import MixerCache
from smat.ops import smat_attention_at
from tests.layers import mixers
from tests.ops.smat.comparison import make_inputs
from tests.ops.smat.decoding import at, empty_for, prefill

LENGTH, BATCH, HEADS, GROUP = 24, 2, 2, 2
ROWS = (3, 23, 11)
ANYTHING = ("list", "word", "number", "dict")
TENSOR = (*ANYTHING, "complex", "deeper", "meta")
WHOLE = ("list", "word", "nan", "half", "negative", "dict", "yes")

# What breaks an argument, beside what breaks every tensor.
OF_TENSOR = {
    "q": ("none", "integers", "flat", "short", "twice", "empty", "heads", "width", "double"),
    "k": ("none", "integers", "flat", "short", "twice", "empty", "heads", "width", "double"),
    "v": ("none", "integers", "flat", "short", "twice", "empty", "heads", "no width", "double"),
    "log_decay": ("integers", "flat", "short", "twice", "empty", "heads", "bool", 0.25, math.inf),
    "key_gate": ("integers", "flat", "short", "twice", "empty", "heads", "bool", -0.5, -math.inf),
    "write_weight": ("integers", "flat", "short", "twice", "empty", "heads", "bool"),
    "profile": ("floats", "flat", "short", "twice", "empty", "heads", "bool", 99, -1),
    "query_type": ("floats", "flat", "short", "twice", "empty", "heads", "bool", 99, -1),
    "read_weight": ("integers", "flat", "short", "twice", "empty", "heads", "bool"),
    "positions": ("floats", "bool", 99, -1),
    "attention_mask": ("short", "twice", "empty", "flat", 2, -1, "floats", "additive", "half full"),
    "cu_seqlens": ("short", "twice", "empty", "floats", "bool", 99, -1),
    "hidden_states": ("none", "integers", "flat", "twice", "empty", "heads", "bool"),
    "query_direction": ("floats", "bool", "flat", "short", "twice", "empty", "heads", 99, -1),
    "token_ids": ("none", "floats", "short", "twice", "empty", "bool", "flat", 99, -1),
}
WORDS = ("branch", "decay_scope", "backend", "feature_map", "fold")
OTHERS = {
    "mask": ("none", "list", "word", "number", "dict", "geometry"),
    "boundary": ("list", "word", "number", "dict"),
    "past_key_values": ("list", "word", "dict", "number", "foreign cache"),
}


def simple(name, kind, value):
    """Return what an argument is broken to, if that has nothing to do with what it was."""
    made = {
        "none": lambda: None,
        "list": lambda: [[1, 0]],
        "word": lambda: "twig",
        "number": lambda: 3,
        "dict": lambda: {"state": 1},
        "nan": lambda: math.nan,
        "half": lambda: 32.5,
        "negative": lambda: -7,
        "yes": lambda: True,
        "huge": lambda: 10**20,
        "composite": lambda: 9,
        "geometry": lambda: smat.Geometry(3, 3),
        "foreign cache": lambda: MixerCache(torch.tensor([4, 4]), {"other": torch.zeros(2)}),
        "lambda short": lambda: lambda x: x[:, :-1],
        "lambda integers": lambda: lambda x: x.long(),
        "lambda none": lambda: lambda x: None,
    }
    return made[kind]() if kind in made else break_tensor(kind, value)


def break_tensor(kind, x):
    """Return a tensor with something wrong: its dtype, device, shape, or a value."""
    if not isinstance(kind, str):  # the last value becomes this one
        changed = x.clone()
        changed.view(-1)[-1] = kind
        return changed
    time = min(1, x.ndim - 1)
    made = {
        "complex": lambda: x.to(torch.complex64),
        "deeper": lambda: x.unsqueeze(0),
        "meta": lambda: x.to("meta"),
        "integers": lambda: x.long(),
        "floats": lambda: torch.full_like(x, math.nan, dtype=torch.float32),
        "additive": lambda: torch.full_like(x, -math.inf, dtype=torch.float32),
        "half full": lambda: torch.full_like(x, 0.5, dtype=torch.float32),
        "bool": lambda: x.bool(),
        "double": lambda: x.double(),
        "flat": lambda: x.flatten(),
        "short": lambda: x.narrow(time, 0, x.shape[time] - 1),
        "twice": lambda: torch.cat([x, x]),
        "empty": lambda: x[:0],
        "heads": lambda: torch.cat([x, x, x[:, :, :1]], 2),
        "width": lambda: x[..., 1:],
        "no width": lambda: x[..., :0],
    }
    return made[kind]()


def breakages(name, value, target):
    """List the ways to break an argument of a call, all of which must be refused."""
    if name in OF_TENSOR:
        if name == "token_ids" and target == "layer step":
            return TENSOR[:4]
        extra = OF_TENSOR[name]
        if target == "step":  # has no time axis
            extra = tuple(kind for kind in extra if kind not in ("short", "heads"))
        if target == "at" and name == "positions":
            extra = (*extra, "short", "twice", "empty")
        return (*TENSOR, *extra)
    if name == "feature_map":
        # A state without tokens has nothing to apply a map to.
        return ("none", "list", "word", "number", *(() if target == "empty" else LAMBDAS))
    if name in WORDS:
        return ("none", "list", "word", "number")
    if name in OTHERS:
        return OTHERS[name]
    return (*WHOLE, *(("huge", "composite") if name == "field_size" else ("none",)))


LAMBDAS = ("lambda short", "lambda integers", "lambda none")


def tensors(batch=BATCH, packed=False):
    """Draw a call with everything that a token can have, in fp32."""
    inputs = make_inputs(LENGTH, batch=batch, heads=HEADS, group=GROUP, dtype=torch.float32)
    generator = torch.Generator().manual_seed(5)
    shape, reads = (batch, LENGTH, HEADS), (batch, LENGTH, HEADS * GROUP, 2)
    inputs["log_decay"] = -torch.rand(shape, generator=generator)
    inputs["key_gate"] = torch.rand(shape, generator=generator)
    inputs["write_weight"] = torch.rand(shape, generator=generator)
    inputs["profile"] = torch.randint(1 if packed else 9, shape, generator=generator)
    inputs["query_type"] = torch.randint(1 if packed else 12, reads, generator=generator)
    inputs["read_weight"] = torch.rand(reads, generator=generator)
    return inputs


def made_mask():
    return smat.SMatMask(LENGTH, 3, 4, field_size=3)


def op_call(target):
    """Return a function of the op or of a state, and valid arguments."""
    inputs, mask = tensors(), made_mask()
    words = {"feature_map": "elu", "branch": "both", "decay_scope": "all", "backend": "auto"}
    if target == "attention":
        extra = {"mask": mask, "attention_mask": torch.ones(BATCH, LENGTH).long()}
        return smat.smat_attention, inputs | words | extra | {"positions": torch.tensor(ROWS)}
    if target == "packed":
        extra = {"mask": mask, "cu_seqlens": torch.tensor([0, 10, LENGTH])}
        return smat.smat_attention, tensors(1, packed=True) | words | extra
    if target == "at":
        rows = torch.tensor(ROWS)
        few = {name: inputs[name][:, rows] for name in ("q", "query_type", "read_weight")}
        return smat_attention_at, inputs | few | words | {"mask": mask, "positions": rows}
    if target == "empty":
        del words["backend"]
        sizes = {"batch": 2, "heads": 2, "key_dim": 4, "value_dim": 3}
        return smat.SMatState.empty, {"mask": mask, **sizes, **words, "fold": "spread"}
    if target == "step":
        _, state = prefill({name: x[:, :9] for name, x in inputs.items()}, mask)
        return state.step, at(inputs, 9)
    state = empty_for(mask, inputs)
    return state.extend, inputs | {"attention_mask": torch.ones(BATCH, LENGTH).long()}


def layer_call(target, choices):
    """Return a layer's forward or step, and valid arguments."""
    layer = mixers.make(choices.pick("layer", list(mixers.LAYERS)))
    x, ids = mixers.tokens(BATCH, 5)
    if target == "layer packed":
        given = {"hidden_states": x[:1], "cu_seqlens": torch.tensor([0, 2, 5])}
        return layer, given | mixers.extras(layer, ids[:1])
    given = {"hidden_states": x, **mixers.extras(layer, ids)}
    if "query_direction" in layer.extra_inputs:
        given["query_direction"] = torch.zeros(BATCH, 5, 2).long()
    if target == "layer":
        mask = torch.ones(BATCH, 5)
        return layer, given | {"attention_mask": mask, "positions": torch.tensor([1, 4])}
    _, _, cache = layer(use_cache=True, **given)
    return layer, given | {"past_key_values": cache}


def mask_call(target):
    """Return a maker of masks, geometries or schedules, and valid arguments."""
    return {
        "mask": (smat.SMatMask, {
            "seq_len": 32, "vc_dim": 3, "chunk_size": 4, "field_size": 3,
            "boundary": smat.schedules.kept(8),
        }),
        "geometry": (smat.Geometry, {"vc_dim": 3, "field_size": 3}),
        "for_distant": (smat.Geometry.for_distant, {"num_distant": 9, "vc_dim": 2}),
        "for_length": (made_mask().for_length, {"seq_len": 20}),
        "kept": (smat.schedules.kept, {"num_distant": 4}),
        "window": (smat.schedules.window, {"step": 4}),
    }[target]  # fmt: skip


OPS = ("attention", "packed", "at", "empty", "step", "extend")
LAYERS = ("layer", "layer packed", "layer cached")
MASKS = ("mask", "geometry", "for_distant", "for_length", "kept", "window")


def malformed(choices):
    """Break one argument of a valid call: a ValueError or TypeError names it or what it was."""
    target = choices.pick("target", [*OPS, *OPS, *LAYERS, *LAYERS, *MASKS])
    if target in OPS:
        call, arguments = op_call(target)
    elif target in LAYERS:
        call, arguments = layer_call(target, choices)
    else:
        call, arguments = mask_call(target)
    name = choices.pick("argument", [*arguments, "unknown"])
    if name == "unknown":
        value = "cu_seqlen"
        broken = partial(call, **arguments, cu_seqlen=3)
    else:
        known = name.removesuffix("_t")
        kind = choices.pick("breakage", breakages(known, arguments[name], target))
        value = simple(known, kind, arguments[name])
        broken = partial(call, **{**arguments, name: value})
    try:
        with torch.no_grad():
            broken()
    except (ValueError, TypeError) as error:
        message = str(error)
    else:
        raise AssertionError(f"{target} took {name} = {describe(value)} in silence")
    assert says(message, name, value), f"does not say what was given: {message}"


def describe(value):
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {tuple(value.shape)} on {value.device}"
    return repr(value)


def says(message, name, value):
    """Say whether a message holds the argument's name or what the caller gave."""
    named = [name, name.removesuffix("_t"), name.replace("_", " ")]
    given = [*named, type(value).__name__, str(value), repr(value)]
    if isinstance(value, torch.Tensor):
        shapes = str(tuple(value.shape)), str(tuple(value.shape[:2]))
        given = [*named, *shapes, str(value.dtype), str(value.device)]
    return any(re.search(rf"(?<!\w){re.escape(word)}(?!\w)", message) for word in given)
