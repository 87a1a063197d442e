"""Models of subset routing: coefficients computed once equal every example computed whole."""

import pytest
import torch

import smat
from smat.models import RoutingModelConfig
from smat.ops.feature_maps import Favor
from smat.tasks import MQAR, SubsetRouting

ARMS = ["smat", "softmax", "mamba2", "deltanet", "gated_deltanet", "log_linear"]


def small_task(vc_dim=2, **fields):
    return SubsetRouting(num_landmarks=3, vc_dim=vc_dim, seq_len=128, chunk_size=16, **fields)


def test_smat_equals_the_dense_oracle_example_by_example():
    """Lay each example out as a sequence of values, and attend from its row."""
    task = small_task()
    model = RoutingModelConfig("smat", vc_dim=2).build(task).double()
    batch = task.train_batch(step=0, batch_size=16, seed=0)
    payload, request = batch.inputs["payload"].double(), batch.inputs["request"]
    x, length = model.position, task.max_length
    hidden = torch.zeros(16, length, 3, dtype=torch.float64)
    hidden[:, task.landmarks, torch.arange(3)] = payload
    v = model.v_proj(hidden)[:, :, None]
    q, k = (p(x).expand(16, -1, -1)[:, :, None] for p in (model.q_proj, model.k_proj))
    out = smat.reference_attention(q, k, v, task.mask, feature_map=Favor(32))
    rows = batch.rows[:, 0]
    read = out[torch.arange(16), rows, 0]
    found = model(rows=batch.rows, payload=payload, request=request)[:, 0]
    torch.testing.assert_close(found, model.head(read), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("mixer", ARMS)
def test_no_row_sees_a_landmark_behind_it(mixer):
    task = small_task(vc_dim=1)
    model = RoutingModelConfig(mixer).build(task)
    share = model.coefficients()
    behind = model.rows[:, None] < task.landmarks
    assert behind.any()
    assert (share[behind] == 0).all()
    assert (share[~behind] != 0).all()


def test_smat_makes_nothing_of_landmarks_off_the_trace():
    task = small_task(vc_dim=2)
    model = RoutingModelConfig("smat", vc_dim=2).build(task)
    seen = task.mask.dense()[model.rows][:, task.landmarks]
    assert torch.equal(model.coefficients() != 0, seen)


@pytest.mark.parametrize("mixer", ARMS)
def test_every_parameter_of_the_mixer_learns(mixer):
    task = small_task(vc_dim=1)
    model = RoutingModelConfig(mixer).build(task)
    batch = task.train_batch(step=0, batch_size=8, seed=0)
    task.loss(model(rows=batch.rows, **batch.inputs), batch).backward()
    unused = {name for name, p in model.named_parameters() if p.grad is None}
    gates = {"mamba2": {"beta", "level"}, "deltanet": {"step", "level", "dt_bias", "A_log"},
             "gated_deltanet": {"level"}, "log_linear": {"beta"}}.get(mixer, set())  # fmt: skip
    assert all(any(part in name for part in gates) for name in unused), unused


def test_a_request_in_content_is_read_where_all_landmarks_are_seen():
    task = small_task(vc_dim=1, content=True)
    model = RoutingModelConfig("softmax").build(task)
    assert (task.rows >= task.landmarks.max()).all()
    assert model.coefficients().shape == (8, 3)
    assert not torch.allclose(*model.coefficients()[[0, 7]])


def test_an_unknown_mixer_and_a_task_without_landmarks_are_refused():
    with pytest.raises(ValueError, match="one of smat, softmax"):
        RoutingModelConfig("transformer").build(small_task())
    with pytest.raises(ValueError, match=r"landmarks, got MQAR\("):
        RoutingModelConfig("smat").build(MQAR())
