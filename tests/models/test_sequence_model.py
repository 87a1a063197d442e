"""One skeleton, injected mixers: only wanted rows, every parameter learning, clear refusals."""

import pytest
import torch

from smat.layers import SMatAttention
from smat.models import ModelConfig
from smat.models.mixers import MIXERS
from smat.tasks import MQAR, LengthRecall, MultiKeyRecall

pytestmark = pytest.mark.filterwarnings("ignore::smat.SMatWarning")
RECALL = MQAR(
    32, train_loads=((16, 2, 100), (64, 4, 100)), eval_loads=((16, 2), (64, 4)), num_eval=8
)
KEYS = MultiKeyRecall(num_keys=2, seq_len=64, num_pairs=4, num_answers=4)

HEADS = {"num_heads": 4, "head_dim": 8}
STATE = {"head_dim": 8, "state_dim": 8, "expand": 1}
SMAT = HEADS | {"conv_size": 3, "qk_norm": True, "decay_gate": True, "chunk_size": 16}
# The models of multi-key recall: one layer, learned positions, an MLP.
ONE_LAYER = {
    "softmax": ("softmax", {"num_heads": 4, "qk_norm": True, "positions": "none"}),
    "mamba2": ("mamba2", STATE),
    "log_linear": ("mamba2_log_linear", STATE),
    "deltanet": ("deltanet", HEADS | {"expand_v": 1.0}),
    "gated_deltanet": ("gated_deltanet", HEADS | {"expand_v": 1.0}),
    "linear": ("linear", SMAT),
    "linear_matched": ("linear", SMAT | {"feature_dim": 104}),
    **{f"smat_d{d}": ("smat_hashed", SMAT | {"vc_dim": d}) for d in (2, 3, 4)},
    **{f"lsh_d{d}": ("smat_hashed", SMAT | {"vc_dim": d, "point_read": True}) for d in (3, 4)},
    **{f"learned_d{d}": ("smat_hashed", SMAT | {"vc_dim": d, "learned_direction": True})
       for d in (3, 4)},
    **{f"mamba2_smat_d{d}": ("mamba2_smat", STATE | {"vc_dim": d}) for d in (2, 3, 4)},
}  # fmt: skip
# The models of multi-query and joint recall: two layers, tied read-out.
MAMBA2 = {"head_dim": 16, "state_dim": 16, "expand": 2}
DELTA = {"head_dim": 16, "num_heads": 2, "expand_v": 1.0}
TWO_LAYERS = {
    "mamba2": ("mamba2", MAMBA2),
    "mamba2_log_linear": ("mamba2_log_linear", MAMBA2),
    **{f"mamba2_smat_d{d}": ("mamba2_smat", MAMBA2 | {"vc_dim": d}) for d in (2, 3, 4)},
    "gated_deltanet": ("gated_deltanet", DELTA),
    "gated_deltanet_log_linear": ("gated_deltanet_log_linear", DELTA),
    **{f"gated_deltanet_smat_d{d}": ("gated_deltanet_smat", DELTA | {"vc_dim": d})
       for d in (2, 3, 4)},
}  # fmt: skip


def build(config, task):
    torch.manual_seed(0)
    return config.build(task).double()


def one_layer(arm):
    mixer, options = ONE_LAYER[arm]
    config = ModelConfig(mixer, 32, options=options, learned_positions=True, mlp_ratio=4.0)
    return build(config, KEYS)


def two_layers(arm):
    mixer, options = TWO_LAYERS[arm]
    return build(ModelConfig(mixer, 32, num_layers=2, options=options, tied=True), RECALL)


def doubles(batch):
    return {name: x.double() if x.is_floating_point() else x for name, x in batch.inputs.items()}


@pytest.mark.parametrize("arm", ONE_LAYER)
def test_rows_alone_equal_rows_of_the_whole(arm):
    model = one_layer(arm)
    batch = KEYS.train_batch(step=0, batch_size=2, seed=0)
    inputs = doubles(batch)
    some, whole = model(rows=batch.rows, **inputs), model(**inputs)
    expected = whole.gather(1, batch.rows[..., None].expand(-1, -1, whole.shape[-1]))
    torch.testing.assert_close(some, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("arm", ["linear", "smat_d3", "learned_d3"])
def test_smat_attention_makes_only_the_rows_that_all_examples_ask_at(arm):
    model = one_layer(arm)
    shapes = []
    for block in model.blocks:
        assert isinstance(block.mixer, SMatAttention)
        block.mixer.o_proj.register_forward_hook(lambda _, given, out: shapes.append(out.shape))
    batch = KEYS.train_batch(step=0, batch_size=2, seed=0)
    model(rows=batch.rows, **doubles(batch))
    model(**doubles(batch))
    assert [shape[1] for shape in shapes] == [KEYS.num_answers, KEYS.seq_len]


@pytest.mark.parametrize("arm", TWO_LAYERS)
@pytest.mark.parametrize("step", [0, 1])  # one batch of each length
def test_recall_models_learn_at_every_length(arm, step):
    model = two_layers(arm)
    batch = RECALL.train_batch(step, 100, seed=0)
    out = model(rows=batch.rows, **batch.inputs)
    assert out.shape == (*batch.rows.shape, 32)
    loss = RECALL.loss(out, batch)
    balance = model.balance_loss()
    assert (balance is not None) == ("smat" in arm)
    (loss if balance is None else loss + balance.double()).backward()
    learned = [p.grad is not None for p in model.parameters()]
    # With a memory only the hash and the scorer of the batch's field size take part.
    assert all(learned) if "smat" not in arm else sum(learned) > 0.5 * len(learned)


def test_answers_in_the_first_half_ignore_what_follows():
    model = two_layers("mamba2_smat_d2")
    ids = RECALL.train_batch(1, 4, 0).inputs["token_ids"]
    changed = ids.clone()
    changed[:, -1] = (changed[:, -1] + 1) % 32
    before, after = model(token_ids=ids), model(token_ids=changed)
    assert torch.equal(before[:, :-1], after[:, :-1])
    assert not torch.equal(before[:, -1], after[:, -1])


@pytest.mark.parametrize("name", ["none", "kept", "rebuilt", "doubling", "window_8", "window_4"])
def test_boundary_schedules_take_longer_inputs_than_they_were_made_for(name):
    task = LengthRecall(64, 4, (64, 128), 128, (0, 16), 16, 16, 16, 16, num_eval=2)
    options = {"num_heads": 2, "vc_dim": 2, "decay_gate": True, "boundary": name}
    model = build(ModelConfig("smat_schedule", 16, options=options), task)
    for batch in task.eval_batches(seed=0):
        assert model(rows=batch.rows, **batch.inputs).isfinite().all()


@pytest.mark.parametrize("position_std", [0.0, 0.02])
def test_positions_that_start_at_zero_leave_a_key_one_address(position_std):
    task = MultiKeyRecall(num_keys=1, seq_len=128)
    options = {"head_dim": 16, "state_dim": 16, "vc_dim": 3}
    config = ModelConfig(
        "mamba2_smat", 64, options=options, learned_positions=True, position_std=position_std
    )
    torch.manual_seed(0)
    model = config.build(task)
    assert abs(model.positions.detach().std().item() - position_std) < 1e-3
    # One key at every place, a marker behind it: the token before is the key at every marker.
    ids = torch.tensor([1, task.marker]).repeat(1, 64)
    embedded = model.tokens(ids) + model.positions
    block = model.blocks[0]
    routing, _ = block.mixer.memory.learned(block.norm(embedded))
    addresses = routing.profile[0, 1::2]
    assert bool((addresses == addresses[:1]).all()) == (position_std == 0)


def test_unknown_mixers_norms_and_options_are_refused():
    with pytest.raises(ValueError, match="one of softmax"):
        ModelConfig("transformer", 16).build(KEYS)
    with pytest.raises(ValueError, match="'batch'"):
        ModelConfig("mamba2", 64, norm="batch").build(KEYS)
    with pytest.raises(ValueError, match="as many tokens as outputs"):
        ModelConfig("deltanet", 16, tied=True, options={"num_heads": 1}).build(KEYS)
    with pytest.raises(TypeError, match="'conv_size'"):
        ModelConfig("mamba2", 64, conv_size=4)


@pytest.mark.parametrize("mixer", MIXERS)
def test_an_unknown_option_of_a_mixer_is_refused_by_its_name(mixer):
    needed = {"smat_schedule": {"boundary": "kept"}, "mixture_of_memories": {"count_types": False}}
    options = needed.get(mixer, {}) | {"no_such_option": 1}
    if mixer.endswith("smat") or mixer == "mixture_of_memories":
        options["vc_dim"] = 2
    with pytest.raises(TypeError, match="no_such_option"):
        ModelConfig(mixer, 32, options=options).build(RECALL)
