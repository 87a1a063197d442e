"""Sizes of the decode cache."""

import pytest

from smat.report.terminal_tables import geometry_row


@pytest.mark.parametrize(("dtype", "size"), [("fp64", 8), ("fp32", 4), ("bf16", 2), ("fp16", 2)])
def test_a_state_is_features_by_values_and_normaliser(dtype, size):
    row = geometry_row(4096, 3, heads=3, key_dim=16, value_dim=24, batch=5, dtype=dtype)
    assert row["cache_bytes"] == row["cache_states"] * 3 * 5 * 16 * 25 * size


@pytest.mark.parametrize("name", ["heads", "key_dim", "value_dim", "batch"])
def test_sizes_below_one_are_refused(name):
    with pytest.raises(ValueError, match=f"{name} must be 1 or more, but it is 0"):
        geometry_row(4096, 3, **{name: 0})


def test_the_cache_is_every_type_and_the_running_state():
    row = geometry_row(4096, 3, key_dim=8, value_dim=7)
    assert row["cache_states"] == row["num_types"] + 1
    assert row["cache_bytes"] == row["cache_states"] * 8 * 8 * 4
    assert row["num_distant"] + row["num_recent"] == 4096
