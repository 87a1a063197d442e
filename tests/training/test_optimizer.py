"""What decays and what does not, and that the optimiser is the one asked for."""

import pytest
import torch
from torch import nn

import smat
from smat.layers.log_linear import LevelWeights
from smat.layers.routing.learned import HashProjection
from smat.training import TrainingConfig
from smat.training.recipe import make_optimizer, parameter_groups


class RMSNorm2d(nn.Module):
    """A norm whose weight has the shape of a matrix."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 3))


class Model(nn.Module):
    """One parameter of each kind."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.conv = nn.Conv1d(4, 4, 3, groups=4)
        self.norm = nn.LayerNorm(4)
        self.head_norm = RMSNorm2d()
        self.A_log = nn.Parameter(torch.zeros(4, 4))
        self.dt_bias = nn.Parameter(torch.zeros(2, 4))
        self.D = nn.Parameter(torch.ones(2, 4))
        self.frozen = nn.Parameter(torch.ones(4, 4), requires_grad=False)
        self.head = nn.Linear(4, 5)
        self.head.weight = self.embed.weight  # tied


def config(**changes):
    return TrainingConfig(steps=10, batch_size=1, learning_rate=0.1, weight_decay=0.3, **changes)


def names_by_decay(model, groups):
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {g["weight_decay"]: {names[p] for p in g["params"]} for g in groups}


def test_only_matrices_decay_and_no_parameter_of_the_dynamics():
    model = Model()
    assert names_by_decay(model, parameter_groups(model, config())) == {
        0.3: {"embed.weight", "conv.weight"},
        0.0: {
            "conv.bias", "norm.weight", "norm.bias", "head_norm.weight", "A_log", "dt_bias", "D",
            "head.bias",
        },
    }  # fmt: skip


@pytest.mark.parametrize(
    ("layer", "kept"),
    [
        (HashProjection(4, num_heads=2, geometry=smat.Geometry(3, 5)), {"gain", "bias"}),
        (LevelWeights(4, num_heads=2, num_levels=3), {"scale"}),
    ],
    ids=["hash", "levels"],
)
def test_what_a_layer_marks_does_not_decay_though_it_has_the_shape_of_a_matrix(layer, kept):
    assert names_by_decay(layer, parameter_groups(layer, config()))[0.0] == kept


def test_all_means_all_and_a_tied_weight_counts_once():
    model = Model()
    (group,) = parameter_groups(model, config(decay="all"))
    assert group["weight_decay"] == 0.3
    assert len(group["params"]) == len({id(p) for p in group["params"]}) == 10
    assert all(parameter.requires_grad for parameter in group["params"])


@pytest.mark.parametrize("kind", ["adam", "adamw"])
def test_adam_puts_decay_into_the_gradient_and_adamw_apart(kind):
    model = nn.Linear(3, 3)
    nn.init.ones_(model.weight)
    optimizer = make_optimizer(model, config(optimizer=kind))
    model(torch.zeros(1, 3)).sum().backward()  # the weight has no gradient but its decay
    optimizer.step()
    # AdamW shrinks by lr * decay; Adam moves by lr, whatever the size of the decay.
    expected = {"adam": 1 - 0.1, "adamw": 1 - 0.1 * 0.3}[kind]
    torch.testing.assert_close(model.weight, torch.full((3, 3), expected))


def test_a_model_without_parameters_is_refused():
    with pytest.raises(ValueError, match="Identity has no parameter to train"):
        make_optimizer(nn.Identity(), config())
