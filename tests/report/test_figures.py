"""A picture of a mask colours each entry by what it is."""

import pytest
import torch

from smat.masks import boundary
from smat.masks.mask import SMatMask
from smat.report import mask_figure
from smat.report.mask_figure import classify

LONG = (mask_figure.LONG_RANGE, mask_figure.LONG_RANGE_NEXT)

SCHEDULES = [
    None,
    boundary.none(),
    boundary.kept(24),
    boundary.doubling(),
    boundary.window(8),
]


def one_of(kind, codes):
    return torch.isin(kind, torch.tensor(codes, dtype=kind.dtype))


@pytest.mark.filterwarnings("ignore::smat.masks.mask.SMatWarning")
@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: s.describe() if s else "default")
@pytest.mark.parametrize("vc_dim", [1, 2, 3, 4])
def test_colours_agree_with_the_mask(vc_dim, schedule):
    mask = SMatMask(64, vc_dim, chunk_size=8, boundary=schedule)
    kind = classify(mask)
    visible = mask.dense()
    position = torch.arange(64)
    distant = position[None, :] < mask.boundaries()[:, None]
    assert torch.equal(one_of(kind, (mask_figure.CAUSAL, *LONG)), visible)
    assert torch.equal(one_of(kind, LONG), visible & distant)
    assert torch.equal(kind == mask_figure.FUTURE, torch.ones(64, 64).triu(1).bool())


def test_hyperplanes_of_one_direction_share_a_colour():
    mask = SMatMask(128, 3, chunk_size=16)
    kind = classify(mask)
    q = mask.geometry.field_size
    for row in range(mask.num_distant, 128):
        direction = int(mask.query_type(torch.tensor([row]))) // q
        seen = kind[row, : mask.num_distant]
        assert set(seen[one_of(seen, LONG)].tolist()) == {LONG[direction % 2]}


def test_figure_has_a_panel_a_mask_and_one_legend():
    pytest.importorskip("matplotlib")
    masks = [SMatMask(128, vc_dim, chunk_size=16) for vc_dim in (1, 2, 3)]
    figure = mask_figure.mask_figure(masks)
    assert [axis.get_title().split(",")[0] for axis in figure.axes] == ["d = 1", "d = 2", "d = 3"]
    assert len(figure.legends) == 1
    assert len(figure.legends[0].get_texts()) == 4


def test_a_picture_too_large_or_empty_is_refused():
    with pytest.raises(ValueError, match="5000"):
        mask_figure.mask_figure([SMatMask(5000, 3)])
    with pytest.raises(ValueError, match="at least one"):
        mask_figure.mask_figure([])


def test_an_unknown_format_is_refused_before_anything_is_written(tmp_path):
    pytest.importorskip("matplotlib")
    with pytest.raises(ValueError, match=r"picture\.doc"):
        mask_figure.save_mask_figure([SMatMask(128, 2, chunk_size=16)], tmp_path / "picture.doc")
    assert list(tmp_path.iterdir()) == []
