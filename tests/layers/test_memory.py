"""Memories of distant tokens against their definitions: values, gradients, limits of theory."""

import copy
import itertools

import pytest
import torch

from smat.layers import (
    CallInfo,
    MemorySettings,
    ProfileMemory,
    TransportedMemory,
    sum_balance_losses,
)
from smat.layers.mixer import reset_children
from smat.layers.routing.selector_names import SELECTORS
from smat.masks import SMatMask, doubling, kept, none, rebuilt, window
from smat.ops import smat_attention
from smat.ops.delta_rule.reference import delta_rule_reference
from smat.ops.log_linear.reference import decay_reference
from tests.layers.memory_definition import (
    BATCH,
    CPU,
    HEADS,
    HIDDEN,
    LENGTH,
    assert_equals_definition,
    call,
    define,
    make,
    quietly,
    tokens_for,
)

pytestmark = pytest.mark.filterwarnings("ignore::smat.SMatWarning")  # masks of few tokens
MASKS = {
    "plane": quietly(SMatMask(24, 1, 4, boundary=kept(12)), vc_dim=3, field_size=3),
    "line": quietly(SMatMask(24, 1, 4, boundary=kept(12)), vc_dim=2, field_size=3),
    "one point": SMatMask(24, 1, 4, boundary=kept(11)),
}


SETTINGS = {
    "default": MemorySettings(), "paper": MemorySettings.paper(),
    "convolved": MemorySettings(selector_conv=6), "erase": MemorySettings(memory_decay="erase"),
}  # fmt: skip


def moving(boundary):
    return SMatMask(24, 3, chunk_size=4, field_size=3, boundary=boundary)


@pytest.mark.parametrize("kind", [ProfileMemory, TransportedMemory])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_a_memory_is_its_definition(kind, mask, settings):
    grads = assert_equals_definition(make(kind, mask, settings=settings), tokens_for(kind), mask)
    learned = [name for name in grads if "projections" in name and mask.vc_dim > 1]
    assert all(grads[name].abs().max() > 0 for name in learned)


@pytest.mark.parametrize("kind", [ProfileMemory, TransportedMemory])
@pytest.mark.parametrize("selector", list(SELECTORS)[1:])
def test_every_selector_reads_what_it_names(kind, selector):
    mask = MASKS["plane"]
    assert_equals_definition(make(kind, mask, selector=selector), tokens_for(kind), mask)


@pytest.mark.parametrize("boundary", [window(4), window(5), doubling(), none(), rebuilt()], ids=str)
def test_additive_memories_follow_any_boundary(boundary):
    mask = moving(boundary)
    assert_equals_definition(make(ProfileMemory, mask), tokens_for(ProfileMemory), mask)


def test_transported_memories_do_without_decay():
    mask = MASKS["plane"]
    memory, tokens = make(TransportedMemory, mask), tokens_for(TransportedMemory)
    del tokens["log_decay"]
    expected, (out, _) = define(memory, tokens, mask), call(memory, tokens)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", [ProfileMemory, TransportedMemory])
def test_a_memory_passes_gradcheck(kind):
    mask = SMatMask(8, 2, chunk_size=2, field_size=3, boundary=kept(4))
    memory = make(kind, mask, num_reads=2)
    tokens = tokens_for(kind, batch=1, length=8)
    # The address is held fixed where its surrogate is differentiated: hidden states stay out.
    names = [name for name in tokens if name != "hidden"]

    def out(*values):
        return call(memory, tokens | dict(zip(names, values, strict=True)))[0]

    inputs = [tokens[name].clone().requires_grad_() for name in names]
    if kind is ProfileMemory:
        names, inputs = names[:-1], inputs[:-1]
    assert torch.autograd.gradcheck(out, inputs)


@pytest.mark.parametrize("kind", [ProfileMemory, TransportedMemory])
def test_one_point_and_open_gates_carry_the_backbone_over_the_boundary(kind):
    mask = MASKS["one point"]
    memory, tokens = make(kind, mask, num_reads=1, settings="paper"), tokens_for(kind)
    for gate in (memory.read_gate, memory.write_gate or memory.read_gate):
        torch.nn.init.zeros_(gate.linear.weight)
        torch.nn.init.constant_(gate.linear.bias, 1e4)
    read, _ = call(memory, tokens)
    q, k, v, log_decay, beta = (tokens[name] for name in ("q", "k", "v", "log_decay", "beta"))
    reset = log_decay.clone()
    reset[:, mask.num_distant] = -torch.inf
    if kind is ProfileMemory:
        local, _ = decay_reference(q, k, v, reset)
        whole, _ = decay_reference(q, k, v, log_decay)
        causal, _ = smat_attention(
            q, k, v, mask, feature_map="identity", log_decay=log_decay, normalize=False,
            branch="causal",
        )  # fmt: skip
        torch.testing.assert_close(causal, local, rtol=1e-10, atol=1e-10)
    else:
        # A decay of exactly 0 times a state: what went before is gone, NaN never appears.
        local, _ = delta_rule_reference(q, k, v, beta, reset)
        whole, _ = delta_rule_reference(q, k, v, beta, log_decay)
    torch.testing.assert_close(local + read, whole, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", [ProfileMemory, TransportedMemory])
def test_a_shut_gate_reads_nothing(kind):
    memory = make(kind, MASKS["plane"])
    torch.nn.init.constant_(memory.read_gate.head_logit, -1e4)
    out, _ = call(memory, tokens_for(kind))
    assert torch.equal(out, torch.zeros_like(out))


@pytest.mark.parametrize(("settings", "start"), [("default", 0.5), ("paper", 0.1)])
def test_gates_begin_where_the_settings_say(settings, start):
    memory = ProfileMemory(64, HEADS, MASKS["plane"], settings=settings)
    hidden = torch.randn(1000, 64, generator=torch.Generator().manual_seed(0))
    for gate in (memory.read_gate, memory.write_gate):
        assert gate(hidden).median().item() == pytest.approx(start, abs=0.03)


@pytest.mark.parametrize("kind", [ProfileMemory, TransportedMemory])
def test_only_the_hash_learns_from_the_balance_loss(kind):
    memory = make(kind, MASKS["plane"])
    call(memory, tokens_for(kind))
    loss = sum_balance_losses(torch.nn.ModuleList([memory]))
    loss.backward()
    for name, parameter in memory.named_parameters():
        assert (parameter.grad is not None) == name.startswith(
            ("learned.conv", "learned.projections")
        ), name
    assert copy.deepcopy(memory).balance_loss is None
    assert sum_balance_losses(torch.nn.Linear(1, 1)) is None


@pytest.mark.parametrize("kind", [ProfileMemory, TransportedMemory])
def test_no_token_changes_what_was_read_before_it(kind):
    masks = [MASKS["plane"]] + ([moving(window(4))] if kind is ProfileMemory else [])
    for mask in masks:
        memory, tokens = make(kind, mask), tokens_for(kind)
        before, _ = call(memory, tokens)
        for t in range(LENGTH):
            other = tokens_for(kind, seed=t + 1)
            changed = {name: x.clone() for name, x in tokens.items()}
            for name, x in changed.items():
                x[:, t] = other[name][:, t]
            after, _ = call(memory, changed)
            assert torch.equal(after[:, :t], before[:, :t])


@pytest.mark.parametrize("kind", [ProfileMemory, TransportedMemory])
def test_padding_changes_nothing_for_real_tokens(kind):
    memory, tokens = make(kind, MASKS["plane"]), tokens_for(kind)
    lengths = [20, 9]
    real = torch.arange(LENGTH) < torch.tensor(lengths)[:, None]
    out, _ = call(memory, tokens, CallInfo(BATCH, LENGTH, CPU, real))
    loss = memory.balance_loss.item()
    assert torch.equal(out[~real], torch.zeros_like(out[~real]))
    for row, length in enumerate(lengths):
        own = {name: x[row : row + 1, :length] for name, x in tokens.items()}
        torch.testing.assert_close(out[row, :length], call(memory, own)[0][0])
        if length > 12:  # the only row with distant tokens
            assert memory.balance_loss.item() == pytest.approx(loss, abs=1e-12)


def test_packed_sequences_read_apart():
    mask = SMatMask(24, 3, chunk_size=4, field_size=3, boundary=kept(5))
    memory, tokens = make(ProfileMemory, mask), tokens_for(ProfileMemory, batch=1)
    edges = [0, 9, 13, 24]
    out, _ = call(memory, tokens, CallInfo(1, LENGTH, CPU, cu_seqlens=torch.tensor(edges)))
    for start, stop in itertools.pairwise(edges):
        own = {name: x[:, start:stop] for name, x in tokens.items()}
        torch.testing.assert_close(out[:, start:stop], call(memory, own)[0])


@pytest.mark.parametrize("kind", [ProfileMemory, TransportedMemory])
def test_each_length_may_have_its_own_geometry(kind):
    masks = [SMatMask(n, 2, chunk_size=4, boundary=kept(n // 2)) for n in (LENGTH, 12)]
    assert masks[0].geometry != masks[1].geometry
    memory = make(kind, masks[0], other_masks=masks[1:])
    for mask in masks:
        tokens = tokens_for(kind, length=mask.seq_len)
        info = CallInfo(BATCH, mask.seq_len, CPU, extras={"mask": mask})
        assert_equals_definition(memory, tokens, mask, info)


@pytest.mark.parametrize("kind", [ProfileMemory, TransportedMemory])
def test_half_precision_goes_through_with_gradients(kind):
    memory = make(kind, MASKS["plane"]).bfloat16()
    tokens = {name: x.bfloat16() for name, x in tokens_for(kind).items()}
    tokens["log_decay"] = tokens["log_decay"].float()
    info = CallInfo(BATCH, LENGTH, CPU, use_cache=True)
    out, state = call(memory, tokens, info)
    assert out.dtype == torch.bfloat16
    assert state is not None
    (out.float().square().sum() + memory.balance_loss).backward()
    assert all(p.grad.isfinite().all() for p in memory.parameters())


@pytest.mark.parametrize("kind", [ProfileMemory, TransportedMemory])
def test_parameters_are_drawn_after_the_meta_device(kind):
    with torch.device("meta"):
        memory = kind(HIDDEN, HEADS, MASKS["plane"])
    memory.to_empty(device="cpu")
    for parameter in memory.parameters():
        torch.nn.init.constant_(parameter, torch.nan)
    reset_children(memory)
    assert all(p.isfinite().all() for p in memory.parameters())


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="kept boundary"):
        call(make(TransportedMemory, moving(window(4))), tokens_for(TransportedMemory))
    with pytest.raises(ValueError, match="top_types"):
        make(ProfileMemory, MASKS["plane"], selector="best")


@pytest.mark.parametrize("kind", [ProfileMemory, TransportedMemory])
def test_a_repr_shows_the_mask(kind):
    assert "vc_dim=3, horizon=24, boundary=kept(12)" in repr(kind(HIDDEN, HEADS, MASKS["plane"]))
