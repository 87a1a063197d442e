"""The stepped-window mask: its definition, one mask for all lengths, and the other schedules."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from smat.masks import SMatMask, doubling, kept, rebuilt, window


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 40), st.integers(1, 150), st.integers(2, 3))
def test_the_definition_entry_by_entry(step, length, vc_dim):
    mask = SMatMask(64, vc_dim, 8, boundary=window(step))
    incidence = mask.geometry.incidence()
    t, j = torch.arange(1, length + 1)[:, None], torch.arange(1, length + 1)[None, :]
    block = (t - 1) // step
    n = ((block - 1) * step).clamp(min=0)
    profile = (j - 1) % mask.geometry.num_profiles
    through_incidence = incidence[t % mask.geometry.num_types, profile]
    expected = torch.where(j <= n, through_incidence, j <= t)
    assert torch.equal(mask.dense(length), expected)


def test_the_main_mask_run_past_its_horizon_keeps_its_boundary():
    mask = SMatMask(128, 3, 16)
    longer = SMatMask(128, 3, 16, boundary=kept(64)).dense(192)
    assert torch.equal(longer[:128, :128], mask.dense())
    assert longer[128:, 64:].equal(torch.ones(192, 128).tril(64)[:64].bool())
    with pytest.raises(ValueError, match="192"):
        mask.dense(192)


def test_the_window_keeps_its_recent_region_while_the_kept_boundary_lets_it_grow():
    horizon = 1024
    stepped = SMatMask(horizon, 2, boundary=window(horizon // 4))
    fixed = SMatMask(horizon, 2, boundary=kept(horizon // 2))
    position = torch.arange(8 * horizon)
    recent = position + 1 - stepped.boundaries(8 * horizon)
    assert recent[horizon // 4 :].min() == horizon // 4 + 1
    assert recent.max() == horizon // 2
    assert (position + 1 - fixed.boundaries(8 * horizon)).max() == 8 * horizon - horizon // 2


def test_boundaries_of_the_compared_schedules_at_the_end_of_8192_tokens():
    masks = {
        "kept": SMatMask(1024, 2, boundary=kept(512)).for_length(8192),
        "rebuilt": SMatMask(1024, 2, boundary=rebuilt()).for_length(8192),
        "doubling": SMatMask(1024, 2, boundary=doubling()).for_length(8192),
        "quarter": SMatMask(1024, 2, boundary=window(256)).for_length(8192),
        "eighth": SMatMask(1024, 2, boundary=window(128)).for_length(8192),
    }
    ends = {name: mask.num_distant for name, mask in masks.items()}
    assert ends == {
        "kept": 512,
        "rebuilt": 4096,
        "doubling": 4096,
        "quarter": 7680,
        "eighth": 7936,
    }
    frozen = [masks[name].geometry.field_size for name in ("kept", "doubling", "quarter", "eighth")]
    assert frozen == [23] * 4
