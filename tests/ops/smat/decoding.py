"""Run a decoder token by token, and say what it must give."""

import torch

import smat
from tests.ops.smat.comparison import make_inputs, mild_gates, mixed_gates, relative_rms

SCHEDULES = {
    "rebuilt": None,
    "kept": smat.schedules.kept(37),
    "none": smat.schedules.none(),
    "doubling": smat.schedules.doubling(),
    "window": smat.schedules.window(16),
    "odd window": smat.schedules.window(7),
    "shortest window": smat.schedules.window(1),
}
KINDS = ("plain", "gated", "routed", "gated and routed")


def make_case(
    mask,
    seq_len,
    kind="plain",
    *,
    batch=2,
    heads=2,
    group=2,
    seed=0,
    harsh=False,
    sharing="queries",
):
    """Draw q, k, v, and gates or routing as the kind says."""
    inputs = make_inputs(seq_len, batch=batch, heads=heads, group=group, seed=seed, sharing=sharing)
    shape = inputs["k"].shape[:3]
    generator = torch.Generator().manual_seed(seed + 7)
    if "gated" in kind:
        gates = mixed_gates if harsh else mild_gates
        inputs["log_decay"] = gates(shape, seed=seed + 1)
        inputs["key_gate"] = torch.rand(shape, generator=generator, dtype=torch.float64)
    if "routed" in kind:
        geometry = mask.geometry
        inputs["profile"] = torch.randint(geometry.num_profiles, shape, generator=generator)
        of_answers = (*shape[:2], heads * group)
        inputs["query_type"] = torch.randint(geometry.num_types, of_answers, generator=generator)
    if kind == "gated and routed":
        inputs["write_weight"] = torch.rand(shape, generator=generator, dtype=torch.float64)
    return inputs


def empty_for(mask, inputs, **options):
    """Start a state for the given inputs."""
    k, v = inputs["k"], inputs["v"]
    answers = max(inputs["q"].shape[2], v.shape[2])
    return smat.SMatState.empty(
        mask, len(k), v.shape[2], k.shape[3], v.shape[3], query_heads=answers,
        dtype=torch.promote_types(v.dtype, torch.float32),
        weighted="write_weight" in inputs, **options,
    )  # fmt: skip


def at(inputs, t):
    """Take one token as `step` wants it."""
    names = {"q": "q_t", "k": "k_t", "v": "v_t"}
    return {names.get(name, name): x[:, t] for name, x in inputs.items()}


def span(inputs, start, stop):
    return {name: x[:, start:stop] for name, x in inputs.items()}


def decode(state, inputs, start=0, stop=None, inplace=True):
    """Feed tokens one by one; return the outputs (B, t, H, V) and the last state."""
    outs = []
    for t in range(start, inputs["k"].shape[1] if stop is None else stop):
        out, state = state.step(**at(inputs, t), inplace=inplace)
        outs.append(out)
    return torch.stack(outs, 1), state


def prefill(inputs, mask, **options):
    """Run the prompt; return the output and the state."""
    return smat.smat_attention(mask=mask, **inputs, output_final_state=True, **options)


def worst_row(found, expected):
    """Return the largest relative RMS of a token's output, over batch rows and tokens."""
    assert found.shape == expected.shape
    rows = zip(found.flatten(0, 1), expected.flatten(0, 1), strict=True)
    return max(relative_rms(*row, least=1e-3) for row in rows)


def snapshot(state):
    """Copy everything that a state is, to compare it later bit by bit."""
    return {name: x.clone() for name, x in state.tensors.items()}, state.positions, state.built


def unchanged(state, before):
    tensors, positions, built = before
    return (
        state.tensors.keys() == tensors.keys()
        and all(torch.equal(x, tensors[name]) for name, x in state.tensors.items())
        and (state.positions, state.built) == (positions, built)
    )
