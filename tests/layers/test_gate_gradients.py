"""Every layer with gates in fp32: their gradients, and those of what makes them, keep their digits.

The layer in fp64 around slow recurrences is what they are compared with.
"""

import math
from contextlib import ExitStack
from unittest import mock

import pytest
import torch

import smat
from smat.layers import (
    GatedDeltaNet,
    LogLinearGatedDeltaNet,
    LogLinearMamba2,
    Mamba2,
    MemorySettings,
    SMatAttention,
    call,
    gated_deltanet,
    log_linear,
    mamba2,
    smat_attention,
)
from smat.ops.delta_rule.reference import (
    delta_rule_reference,
    transition_reference,
    write_reference,
    zero_state,
)
from smat.ops.smat.routing import Routing
from tests.layers.memory_definition import transported_reads
from tests.layers.mixers import PlainTransportedWrites, PlainWrites
from tests.ops.smat.by_rows import attend_by_rows
from tests.ops.smat.comparison import relative_rms

pytestmark = pytest.mark.filterwarnings("ignore::smat.SMatWarning")
HIDDEN, STEP = 8, 0.1
MAMBA = {"state_dim": 3, "head_dim": 8}
DELTA = {"num_heads": 1, "head_dim": 4, "expand_v": 1.0}


def delta_rule(*tokens, initial_state, output_final_state, chunk_size):
    return delta_rule_reference(*tokens)


def read_transported(tokens, routing, mask, info, neighbours, erases):
    ones, decay = torch.ones_like(tokens.beta), "backbone" if erases else "none"
    return transported_reads(tokens._asdict(), ones, routing.profile, routing, mask, decay), None


def by_levels(q, k, v, level_weights, log_decay, beta=None, *, scale=1.0, **_):
    """Keep a state for every level: the next token puts all below the bit that it sets into one."""
    states, outputs = [zero_state(k, v)] * level_weights.shape[-1], []
    for t in range(k.shape[1]):
        step, level = transition_reference(k, beta, log_decay, t), (t ^ (t - 1)).bit_length()
        if t:
            states[level] = sum(states[:level], states[level])
            states[:level] = [zero_state(k, v)] * level
        states = [state if i < level and t else step @ state for i, state in enumerate(states)]
        states[0] = write_reference(k, v, beta, t)
        read = sum(level_weights[:, t, :, i, None, None] * x for i, x in enumerate(states))
        outputs.append(scale * torch.einsum("bhk,bhkv->bhv", q[:, t], read))
    return torch.stack(outputs, 1), None


SLOW = {
    (call, "smat_attention"): attend_by_rows,
    (gated_deltanet, "delta_rule"): delta_rule,
    (gated_deltanet, "read_transported"): read_transported,
    (log_linear, "log_linear_attention"): by_levels,
    (log_linear, "log_linear_delta_rule"): by_levels,
}


def drawn_routing(x, mask, num_heads, **weights):
    """Draw cells and types, so that rounding moves no token to another."""
    generator = torch.Generator().manual_seed(3)
    shape = (*x.shape[:2], num_heads)
    profile = torch.randint(mask.geometry.num_profiles, shape, generator=generator)
    types = torch.randint(mask.geometry.num_types, (*shape, 2), generator=generator)
    read_weight = torch.rand(*shape, 2, generator=generator).to(x)
    return Routing(profile, types, weights.get("write_weight"), read_weight)


class DrawnWrites(PlainWrites):
    def route(self, x, mask, info):
        weight = self.write_gate(x)
        return drawn_routing(x, mask, weight.shape[-1], write_weight=weight), None, None


class DrawnTransportedWrites(PlainTransportedWrites):
    def route(self, x, mask, info):
        return drawn_routing(x, mask, DELTA["num_heads"]), None, None


def memory(kind, num_heads, length, decay):
    mask = smat.SMatMask(length, 3, 16, 3, boundary=smat.schedules.kept(length // 2))
    settings = MemorySettings(memory_decay=decay)
    return kind(HIDDEN, num_heads, mask, num_reads=2, settings=settings)


LAYERS = {
    "smat": lambda length: SMatAttention(
        HIDDEN, num_heads=1, horizon=length, field_size=3, decay_gate=True
    ),
    "smat recurrent": lambda length: SMatAttention(
        HIDDEN, num_heads=1, horizon=length, field_size=3, decay_gate=True, normalize=False,
        decay_scope="recurrent", output_norm=True, key_gate=True,
    ),
    "mamba2": lambda length: Mamba2(HIDDEN, **MAMBA),
    "mamba2 memory": lambda length: Mamba2(
        HIDDEN, **MAMBA, memory=memory(DrawnWrites, 2, length, "backbone")
    ),
    "mamba2 lasting memory": lambda length: Mamba2(
        HIDDEN, **MAMBA, memory=memory(DrawnWrites, 2, length, "none")
    ),
    "gated deltanet": lambda length: GatedDeltaNet(HIDDEN, **DELTA),
    "gated deltanet memory": lambda length: GatedDeltaNet(
        HIDDEN, **DELTA, memory=memory(DrawnTransportedWrites, 1, length, "backbone")
    ),
    "log-linear mamba2": lambda length: LogLinearMamba2(HIDDEN, **MAMBA),
    "log-linear deltanet": lambda length: LogLinearGatedDeltaNet(HIDDEN, **DELTA),
}  # fmt: skip


def make(name, length, gate):
    """Build a layer all of whose gates have one value."""
    torch.manual_seed(0)
    layer = LAYERS[name](length)
    with torch.no_grad():
        if isinstance(layer, Mamba2):
            layer.in_proj.weight[-layer.num_heads :] = 0
            if layer.in_proj.bias is not None:
                layer.in_proj.bias[-layer.num_heads :] = 0
        else:
            layer.a_proj.weight.zero_()
        layer.dt_bias.fill_(torch.tensor(STEP, dtype=torch.float64).expm1().log())
        layer.A_log.fill_(torch.tensor(-gate / STEP, dtype=torch.float64).log())
    return layer


def gradients(layer, length, dtype, slow=False):
    """Return the gradients of the gates at every token, and of what all of them are made of."""
    layer, kept = layer.to(dtype), []
    right = mamba2.step_and_log_decay

    def keep(*given):
        step, log_decay = right(*given)
        log_decay.retain_grad()
        kept.append(log_decay)
        return step, log_decay

    generator = torch.Generator().manual_seed(5)
    x = torch.randn(1, length, HIDDEN, generator=generator).to(dtype)
    with ExitStack() as stack:
        for module in (mamba2, gated_deltanet, smat_attention):
            stack.enter_context(mock.patch.object(module, "step_and_log_decay", keep))
        for (module, function), replaced in SLOW.items() if slow else ():
            stack.enter_context(mock.patch.object(module, function, replaced))
        out = layer(x)[0]
        pull = torch.randn(out.shape, generator=torch.Generator().manual_seed(6)).to(dtype)
        layer.zero_grad()
        out.backward(pull)
    (gates,) = kept
    return {"gates": gates.grad, "A_log": layer.A_log.grad, "dt_bias": layer.dt_bias.grad}


def check(name, length, gate):
    """Compare; sums over t may cancel, and are then measured as if their signs were random."""
    layer = make(name, length, gate)
    found = gradients(layer, length, torch.float32)
    expected = gradients(layer, length, torch.float64, slow=True)
    assert relative_rms(found["gates"], expected["gates"]) <= 1e-4
    sums = (each["gates"].double().sum(1) for each in (found, expected))
    least = expected["gates"].square().sum(1).mean().sqrt().item()
    assert relative_rms(*sums, least) <= 1e-4
    slopes = {"A_log": -gate, "dt_bias": -gate / STEP * -math.expm1(-STEP)}
    for part, slope in slopes.items():
        assert relative_rms(found[part], expected[part], slope * least) <= 1e-4, part


@pytest.mark.parametrize("gate", [-1e-3, -1.0, -20.0])
@pytest.mark.parametrize("name", LAYERS)
def test_gate_gradients_have_their_digits_in_fp32(name, gate):
    check(name, 300, gate)


@pytest.mark.slow
@pytest.mark.parametrize("gate", [-1e-3, -0.1, -1.0, -3.0, -5.0, -10.0, -20.0])
@pytest.mark.parametrize("name", LAYERS)
def test_they_have_them_after_8192_tokens(name, gate):
    check(name, 8192, gate)
