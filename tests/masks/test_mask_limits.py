"""Where a mask warns, where it stays silent, and which recipes it refuses."""

import warnings

import pytest

from smat.masks import SMatMask, SMatWarning, kept, none, window
from smat.masks.guarantee import warn_once

pytestmark = pytest.mark.filterwarnings("ignore::smat.masks.SMatWarning")


@pytest.fixture
def nothing_warned_yet():
    warn_once.cache_clear()


@pytest.mark.usefixtures("nothing_warned_yet")
def test_warns_once_where_the_proof_does_not_apply():
    with pytest.warns(SMatWarning, match=r"T = 84, n = 40, m = 44.*P = 25 and B = 30"):
        mask = SMatMask(84, 3, 20)
    assert not mask.guarantees_vc_dim
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        SMatMask(84, 3, 20)


@pytest.mark.usefixtures("nothing_warned_yet")
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "build",
    [
        lambda: SMatMask(1024, 4),
        lambda: SMatMask(5, 4),  # no distant block: plain causal
        lambda: SMatMask(86, 3, boundary=none()),
        lambda: SMatMask(86, 3, 20, boundary=window(8)),
        lambda: SMatMask(1024, 3).for_length(86),  # packed sequences come in any length
        lambda: SMatMask.from_dict(SMatMask(1024, 3).for_length(86).to_dict()),
    ],
)
def test_stays_silent(build):
    build()


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: SMatMask(0, 2), "seq_len must be 1 or more, but it is 0"),
        (lambda: SMatMask(64, 0), "vc_dim must be 1 or more, but it is 0"),
        (lambda: SMatMask(64, 2, 0), "chunk_size must be 1 or more, but it is 0"),
        (lambda: SMatMask(64, 2, field_size=9), "9"),
        (lambda: SMatMask(64, 2, boundary=kept(65)), r"kept\(65\).*64"),
        (lambda: SMatMask(64, 2, boundary=32), "32"),
        (lambda: SMatMask(64, 2, 16).dense(65), r"65.*64.*for_length\(65\)"),
        (lambda: SMatMask(64, 2, 16).segments(0), "0"),
        (lambda: SMatMask(64, 2, 16).for_length(0), "0"),
        (lambda: SMatMask.from_dict({"seq_len": 3}), "seq_len"),
    ],
)
def test_bad_recipes_are_refused_with_their_numbers(build, message):
    with pytest.raises(ValueError, match=message):
        build()
