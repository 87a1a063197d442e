"""The shears in Triton's interpreter against the torch form, and against each other."""

import pytest
import torch

from smat.geometry.radon import backproject_tables, tabulate_tables
from smat.ops.smat.triton import shear


@pytest.mark.parametrize(("field_size", "ambient_dim"), [(5, 0), (5, 1), (5, 2), (2, 3), (3, 4)])
def test_both_directions(monkeypatch, field_size, ambient_dim):
    monkeypatch.setattr(shear, "TILE_ELEMENTS", 1 << 9)  # several tiles, the last not full
    space, num_tables = (field_size, ambient_dim), 1 if ambient_dim == 4 else 2
    table = torch.rand(num_tables, field_size**ambient_dim + 1, 130)[:, :-1]  # rows lie apart
    types = tabulate_tables(table, *space)
    torch.testing.assert_close(shear.tabulate(table, *space), types)
    pulled = torch.rand_like(types)
    expected = backproject_tables(pulled, *space)
    torch.testing.assert_close(shear.backproject(pulled, *space), expected)
