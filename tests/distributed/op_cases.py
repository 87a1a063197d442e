"""The op over ranks beside the op of one process: output, state and every gradient, by name."""

import itertools
import warnings

import torch

import smat
from tests.distributed.ranks import shares_of
from tests.ops.smat.comparison import (
    DIFFERENTIABLE,
    gradients,
    leaves,
    make_inputs,
    mild_gates,
    mixed_gates,
    relative_rms,
)

SCHEDULES = {
    "rebuilt": None,
    "kept": smat.schedules.kept(13),
    "none": smat.schedules.none(),
    "window": smat.schedules.window(step=4),
    "wide window": smat.schedules.window(step=17),
    "doubling": smat.schedules.doubling(),
}


def make_case(
    length, vc_dim=3, schedule="rebuilt", gates=None, routed=None, options=(), group=1,
    sharing="queries", batch=2, packed=None,
):  # fmt: skip
    """Draw the arguments of the op."""
    warnings.simplefilter("ignore", smat.SMatWarning)
    field_size = None if schedule == "rebuilt" else 3
    mask = smat.SMatMask(length, vc_dim, 4, field_size, SCHEDULES[schedule])
    batch = 1 if packed else batch
    inputs = make_inputs(length, batch=batch, group=group, sharing=sharing)
    generator = torch.Generator().manual_seed(7)
    shape = inputs["v"].shape[:3]
    heads = max(inputs["q"].shape[2], shape[2])
    if gates is not None:
        inputs["log_decay"] = (mild_gates if gates == "mild" else mixed_gates)(shape)
        inputs["key_gate"] = torch.rand(
            inputs["k"].shape[:3], generator=generator, dtype=torch.float64
        )
    if routed is not None:
        geometry = mask.geometry
        if packed:
            lengths = [b - a for a, b in itertools.pairwise(packed) if b > a]
            geometry = min((mask.for_length(n).geometry for n in lengths),
                           key=lambda each: each.num_profiles)  # fmt: skip
        inputs["profile"] = torch.randint(geometry.num_profiles, shape, generator=generator)
        reads = (*shape[:2], heads, *([2] if routed == "several" else []))
        inputs["query_type"] = torch.randint(geometry.num_types, reads, generator=generator)
        if routed == "several":
            for name, size in (("write_weight", shape), ("read_weight", reads)):
                inputs[name] = torch.rand(size, generator=generator, dtype=torch.float64)
    given = dict(options)
    if packed:
        given["cu_seqlens"] = torch.tensor(packed)
    return mask, inputs, given


def compare_op(size, length, uneven=False, state=False, dtype=torch.float64, **case):
    """Return the relative errors of a rank: output, gradients and, of the last rank, the state.

    Inputs of another dtype are compared with the same numbers in fp64, in one process.
    """
    mask, inputs, given = make_case(length, **case)
    inputs = {name: x.to(dtype) if x.is_floating_point() else x for name, x in inputs.items()}
    whole = leaves({name: _wide(x) for name, x in inputs.items()})
    expected, after = smat.smat_attention(**whole, mask=mask, output_final_state=state, **given)
    expected_grads = gradients(expected, whole)
    shares = shares_of(length, size, uneven)
    with smat.context_parallel(shares=shares if uneven else None) as ranks:
        rank = ranks.rank
        begin, end = sum(shares[:rank]), sum(shares[: rank + 1])
        own = leaves({name: x[:, begin:end] for name, x in inputs.items()})
        out, found_after = smat.smat_attention(**own, mask=mask, output_final_state=state, **given)
    assert out.dtype == dtype
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(3))
    weight = weight.bfloat16().to(out.dtype)[:, begin:end]
    named = {name: x for name, x in own.items() if name in DIFFERENTIABLE}
    grads = torch.autograd.grad(out, list(named.values()), weight, allow_unused=True)
    errors = {"out": relative_rms(out, expected[:, begin:end])}
    for (name, x), grad in zip(named.items(), grads, strict=True):
        grad = torch.zeros_like(x) if grad is None else grad
        want = expected_grads[name]
        scale = want.double().square().mean().sqrt().item()
        errors[name] = relative_rms(grad, want[:, begin:end], least=scale)
    if state and rank == size - 1:
        errors |= compare_states(found_after, after, inputs, mask)
    return errors


def _wide(x):
    return x.double() if x.is_floating_point() else x


def compare_states(found, expected, inputs, mask):
    """Let both states decode on: the outputs of the next tokens."""
    assert found.positions == expected.positions
    free = mask.boundary.horizon_free
    errors = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in range(12 if free else 3):
            token = {name: x[:, number] for name, x in inputs.items()}
            for name in ("q", "k", "v"):
                token[f"{name}_t"] = token.pop(name)
            (one, found), (other, expected) = (x.step(**token) for x in (found, expected))
            errors[f"step {number}"] = relative_rms(one, other)
    return errors
