"""Tensors on different devices are refused by name, before one of them is read."""

import pytest
import torch

import smat
from smat.ops import smat_attention_at
from tests.ops.smat.comparison import make_inputs

pytestmark = pytest.mark.filterwarnings("ignore::smat.SMatWarning")
MASK = smat.SMatMask(64, 3, 8, field_size=3)
ROWS = torch.tensor([3, 50])
PER_TOKEN = {
    "log_decay": torch.zeros(2, 64, 2),
    "key_gate": torch.ones(2, 64, 2),
    "write_weight": torch.ones(2, 64, 2),
    "profile": torch.zeros(2, 64, 2, dtype=torch.long),
    "query_type": torch.zeros(2, 64, 2, 1, dtype=torch.long),
    "read_weight": torch.ones(2, 64, 2, 1),
}


def state():
    return smat.smat_attention(mask=MASK, **make_inputs(32), output_final_state=True)[1]


def attend(**given):
    return smat.smat_attention(mask=MASK, **given)[0]


def attend_at(positions=ROWS, **given):
    at = {name: given[name][:, :2] for name in ("q", "query_type", "read_weight") if name in given}
    return smat_attention_at(mask=MASK, positions=positions, **{**given, **at})


def step(**given):
    named = {f"{name}_t" if name in "qkv" else name: x[:, 0] for name, x in given.items()}
    return state().step(**named)[0]


def extend(**given):
    return state().extend(**{name: x[:, :8] for name, x in given.items()})[0]


each_call = pytest.mark.parametrize("call", [attend, attend_at, step, extend])


@each_call
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_queries_keys_and_values_share_a_device(call, name):
    given = make_inputs(64)
    assert call(**given).device.type == "cpu"
    given[name] = given[name].to("meta")
    devices = ", ".join("meta" if each == name else "cpu" for each in "qkv")
    with pytest.raises(ValueError, match=f"q, k, v must share a device, got {devices}"):
        call(**given)


@each_call
@pytest.mark.parametrize("name", PER_TOKEN)
def test_what_is_given_per_token_is_on_their_device(call, name):
    given = make_inputs(64) | PER_TOKEN
    assert call(**given).device.type == "cpu"
    given[name] = given[name].to("meta")
    with pytest.raises(ValueError, match=f"{name} must be .*on cpu.* meta"):
        call(**given)


@pytest.mark.parametrize("call", [step, extend])
def test_new_tokens_are_on_the_device_of_their_state(call):
    given = {name: x.to("meta") for name, x in make_inputs(64).items()}
    with pytest.raises(ValueError, match="the state has a batch of 2 on cpu, got 2 on meta"):
        call(**given)


def test_padding_and_edges_are_on_their_device():
    with pytest.raises(ValueError, match=r"attention_mask must be .*on cpu, got \(2, 64\) on meta"):
        attend(**make_inputs(64), attention_mask=torch.ones(2, 64, device="meta"))
    with pytest.raises(ValueError, match=r"cu_seqlens must be .*on cpu, got .* on meta"):
        attend(**make_inputs(64, batch=1), cu_seqlens=torch.tensor([0, 64], device="meta"))


@pytest.mark.parametrize("call", [attend, attend_at])
def test_positions_are_on_their_device(call):
    given = make_inputs(64)
    assert call(**given, positions=ROWS).shape[1] == 2
    with pytest.raises(ValueError, match="positions must be on cpu as the tokens are, got meta"):
        call(**given, positions=ROWS.to("meta"))
