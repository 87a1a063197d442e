"""The shears in Triton's interpreter against the torch form, and against each other."""

import pytest
import torch

from smat.geometry.radon import backproject_tables, tabulate_tables
from smat.ops.smat.triton import shear

SLOW = [pytest.param(*case, marks=pytest.mark.slow) for case in [(13, 2, 40), (3, 4, 130)]]


@pytest.mark.parametrize(
    ("field_size", "ambient_dim", "columns"),
    [(5, 0, 7), (5, 1, 7), (3, 2, 130), (3, 3, 7), (2, 4, 7), *SLOW],
)
def test_both_directions(monkeypatch, field_size, ambient_dim, columns):
    monkeypatch.setattr(shear, "TILE_ELEMENTS", 1 << 9)  # several tiles, the last not full
    space = (field_size, ambient_dim)
    table = torch.rand(2, field_size**ambient_dim + 1, columns)[:, :-1]  # rows lie apart
    types = tabulate_tables(table, *space)
    torch.testing.assert_close(shear.tabulate(table, *space), types)
    pulled = torch.rand_like(types)
    expected = backproject_tables(pulled, *space)
    torch.testing.assert_close(shear.backproject(pulled, *space), expected)
