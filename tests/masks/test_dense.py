"""The mask written out: given profiles and types, gates, dtypes, and tensors that do not fit."""

import itertools

import pytest
import torch

from smat.masks import SMatMask, doubling, window

pytestmark = pytest.mark.filterwarnings("ignore::smat.masks.SMatWarning")


@pytest.mark.parametrize("boundary", [None, window(8), doubling()])
def test_given_profiles_and_types_replace_the_positional_ones(boundary):
    mask = SMatMask(32, 3, 4, field_size=3, boundary=boundary)
    generator = torch.Generator().manual_seed(0)
    profile = torch.randint(9, (2, 32, 3), generator=generator)
    query_type = torch.randint(12, (2, 32, 3), generator=generator)
    dense = mask.dense(profile=profile, query_type=query_type)
    assert dense.shape == (2, 3, 32, 32)
    incidence = mask.geometry.incidence()
    for b, h, t, j in itertools.product(range(2), range(3), range(32), range(32)):
        on_plane = bool(incidence[query_type[b, t, h], profile[b, j, h]])
        is_distant = j < mask.schedule.boundary_at(t)
        assert bool(dense[b, h, t, j]) == (j <= t and (on_plane or not is_distant))


def test_positional_values_given_by_hand_change_nothing():
    mask = SMatMask(40, 3, 4)
    position = torch.arange(40)
    profile = mask.profile(position)[None, :, None]
    query_type = mask.query_type(position)[None, :, None]
    assert torch.equal(mask.dense(profile=profile)[0, 0], mask.dense())
    assert torch.equal(mask.dense(query_type=query_type.int())[0, 0], mask.dense())
    assert torch.equal(mask.dense(30, profile=profile[:, :30])[0, 0], mask.dense(30))
    assert torch.equal(mask.dense(profile=profile[:, :30])[0, 0], mask.dense(30))


@pytest.mark.parametrize(
    "dtype",
    [torch.uint8, torch.int8, torch.int16, torch.int32, torch.uint16, torch.uint64],
    ids=str,
)
def test_profiles_and_types_of_any_integer_dtype(dtype):
    mask = SMatMask(40, 3, 4)
    position = torch.arange(40).to(dtype)
    profile = mask.profile(position)[None, :, None]
    query_type = mask.query_type(position)[None, :, None]
    assert torch.equal(profile.flatten(), mask.profile(torch.arange(40)))
    assert torch.equal(query_type.flatten(), mask.query_type(torch.arange(40)))
    dense = mask.dense(profile=profile.to(dtype), query_type=query_type.to(dtype))
    assert torch.equal(dense[0, 0], mask.dense())


def test_gates_multiply_between_key_and_query():
    mask = SMatMask(24, 2, 4)
    gate = torch.rand(2, 24, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    gate[0, 5, 1] = gate[0, 15, 1] = 0.0  # two full resets
    gated = mask.dense(log_decay=gate.log())
    assert gated.dtype == torch.float64
    support = mask.dense()
    for b, h, t, j in itertools.product(range(2), range(3), range(24), range(24)):
        product = gate[b, j + 1 : t + 1, h].prod() * support[t, j]
        torch.testing.assert_close(gated[b, h, t, j], product, rtol=1e-12, atol=0)
    assert not gated[0, 1, 15:, :15].any()


def test_gates_never_give_nan_or_overflow():
    log_decay = torch.full((1, 64, 1), -1e30)
    log_decay[0, ::3] = -float("inf")
    gated = SMatMask(64, 2, 8).dense(log_decay=log_decay)
    assert torch.equal(gated[0, 0], torch.eye(64))
    half = SMatMask(64, 2, 8).dense(log_decay=torch.zeros(1, 64, 1, dtype=torch.bfloat16))
    assert half.dtype == torch.bfloat16
    assert torch.equal(half[0, 0].bool(), SMatMask(64, 2, 8).dense())


def test_gradients_of_the_gates_are_finite():
    log_decay = torch.full((1, 64, 1), -1e3)
    log_decay[0, ::3] = -float("inf")
    log_decay.requires_grad_()
    SMatMask(64, 2, 8).dense(log_decay=log_decay).sum().backward()
    assert log_decay.grad is not None
    assert log_decay.grad.isfinite().all()


def test_dtype_and_device_of_the_written_mask():
    mask = SMatMask(16, 2, 4)
    assert mask.dense(dtype=torch.float32).dtype == torch.float32
    assert mask.dense(device="cpu").device.type == "cpu"
    assert mask.dense(log_decay=torch.zeros(1, 16, 1), dtype=torch.float64).dtype == torch.float64
    assert mask.profile(torch.arange(3)).dtype == torch.int64
    assert mask.query_type(torch.arange(3, dtype=torch.int32)).dtype == torch.int64


@pytest.mark.parametrize(
    ("given_tensors", "message"),
    [
        ({"profile": torch.full((1, 64, 1), 7)}, r"profile must lie in 0\.\.6.*7"),
        ({"profile": torch.full((1, 64, 1), -1)}, "-1"),
        ({"query_type": torch.full((1, 64, 1), 7)}, r"query_type must lie in 0\.\.6"),
        ({"profile": torch.zeros(1, 64, 1)}, "float32"),
        ({"profile": torch.zeros(1, 64, 1, dtype=torch.complex64)}, "complex64"),
        ({"query_type": torch.zeros(1, 64, 1, dtype=torch.bool)}, "bool"),
        ({"profile": torch.zeros(64, dtype=torch.long)}, r"\(64,\)"),
        ({"length": 64, "profile": torch.zeros(1, 63, 1, dtype=torch.long)}, r"\(1, 63, 1\)"),
        ({"profile": torch.zeros(1, 65, 1, dtype=torch.long)}, "65"),
        ({"log_decay": torch.full((1, 64, 1), 0.5)}, r"0\.5"),
        ({"log_decay": torch.full((1, 64, 1), float("nan"))}, "nan"),
    ],
)
def test_bad_tensors_are_refused_with_their_numbers(given_tensors, message):
    with pytest.raises(ValueError, match=message):
        SMatMask(64, 2, 16).dense(**given_tensors)
