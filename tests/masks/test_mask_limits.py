"""Where a mask warns, where it stays silent, and which recipes it refuses."""

import warnings

import numpy as np
import pytest
import torch

from smat.masks import SMatMask, SMatWarning, kept, none, window
from smat.masks import mask as mask_module

pytestmark = pytest.mark.filterwarnings("ignore::smat.masks.SMatWarning")


@pytest.fixture
def nothing_warned_yet():
    mask_module._warn_once.cache_clear()


@pytest.mark.usefixtures("nothing_warned_yet")
def test_warns_once_where_the_proof_does_not_apply():
    with pytest.warns(SMatWarning, match=r"T = 84, n = 40, m = 44.*P = 25 and B = 30"):
        mask = SMatMask(84, 3, 20)
    assert not mask.guarantees_vc_dim
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        SMatMask(84, 3, 20)


@pytest.mark.usefixtures("nothing_warned_yet")
@pytest.mark.parametrize(("seq_len", "chunk_size"), [(5, 64), (127, 64), (3, 2)])
def test_warns_once_where_d_is_without_effect(seq_len, chunk_size):
    message = rf"vc_dim = 3 is without effect at T = {seq_len}.*T = 2c = {2 * chunk_size}"
    with pytest.warns(SMatWarning, match=message) as caught:
        mask = SMatMask(seq_len, 3, chunk_size)
    assert caught[0].filename == __file__
    assert torch.equal(mask.dense(), torch.ones(seq_len, seq_len).tril().bool())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        SMatMask(seq_len, 3, chunk_size)
        SMatMask(2 * chunk_size * 16, 2, chunk_size)


@pytest.mark.usefixtures("nothing_warned_yet")
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "build",
    [
        lambda: SMatMask(1024, 4),
        lambda: SMatMask(5, 1),  # plain causal at every length
        lambda: SMatMask(1, 4),  # one token has no past
        lambda: SMatMask(86, 3, boundary=none()),
        lambda: SMatMask(5, 4, boundary=kept(5)),  # what comes later finds a distant block
        lambda: SMatMask(1024, 3).for_length(5),
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
        (lambda: SMatMask(64, 2, boundary=0), "0"),
        (lambda: SMatMask(64, 2, field_size=10**18), "1000000000000000000"),
        (lambda: SMatMask(64, 2, 16).dense(65), r"65.*64.*for_length\(65\)"),
        (lambda: SMatMask(64, 2, 16).segments(0), "0"),
        (lambda: SMatMask(64, 2, 16).for_length(0), "0"),
        (lambda: SMatMask.from_dict({"seq_len": 3}), "seq_len"),
    ],
)
def test_bad_recipes_are_refused_with_their_numbers(build, message):
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: SMatMask(32.5, 2), r"seq_len must be an integer, but it is 32\.5"),
        (lambda: SMatMask(64, 2.0), r"vc_dim must be an integer, but it is 2\.0"),
        (lambda: SMatMask(64, True), "vc_dim must be an integer, but it is True"),
        (lambda: SMatMask(64, 2, "16"), "chunk_size must be an integer, but it is '16'"),
        (lambda: SMatMask(64, 2, field_size=7.0), r"field_size.*7\.0"),
        (lambda: SMatMask(None, 2), "seq_len must be an integer, but it is None"),
        (lambda: SMatMask(64, 2, 16).for_length(32.5), r"seq_len.*32\.5"),
        (lambda: SMatMask(64, 2, 16).segments(32.5), r"seq_len.*32\.5"),
        (lambda: SMatMask(64, 2, 16).dense(32.5), r"seq_len.*32\.5"),
        (lambda: SMatMask(64, 2, 16).dense(profile=[[[0]]]), r"profile.*\[\[\[0\]\]\]"),
    ],
)
def test_what_is_no_integer_is_refused_with_its_value(build, message):
    with pytest.raises(TypeError, match=message):
        build()


def test_integers_of_any_kind_make_one_mask():
    mask = SMatMask(np.int64(64), torch.tensor(2), np.int32(16), np.int16(7))
    assert mask == SMatMask(64, 2, 16, 7)
    assert mask.recipe == SMatMask(64, 2, 16, 7).recipe


def test_a_huge_field_size_answers_at_once():
    assert SMatMask(64, 2, 16, field_size=10**18 + 9).geometry.num_types == 10**18 + 9
