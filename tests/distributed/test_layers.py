"""Every mixer over ranks equals itself in one process, in fp64."""

import pytest
import torch

import smat
from tests.distributed.layer_cases import compare_layer
from tests.distributed.test_op import check
from tests.layers.mixers import LAYERS, make, tokens

PACKED = [0, 3, 4, 14, 17]  # one begins where a rank does


QUICK = [
    "softmax", "routed mamba2", "routed mamba2 window", "routed deltanet", "routed deltanet paper",
    "deltanet", "log-linear mamba2", "log-linear deltanet", "smat gated", "smat content",
    "smat hashed", "mixture of memories", "routed mamba2 request window",
    "routed mamba2 scored request window",
]  # fmt: skip


@pytest.mark.parametrize("name", QUICK)
def test_packed_sequences_over_four_ranks_equal_one_process(name, four_ranks):
    check(four_ranks.run(compare_layer, size=4, name=name, packed=PACKED))


@pytest.mark.parametrize("name", QUICK)
def test_four_ranks_equal_one_process(name, four_ranks):
    check(four_ranks.run(compare_layer, size=4, name=name, use_cache=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in LAYERS if name not in QUICK])
def test_every_other_mixer_over_four_ranks(name, four_ranks):
    check(four_ranks.run(compare_layer, size=4, name=name, use_cache=True))
    check(four_ranks.run(compare_layer, size=4, name=name, packed=PACKED))


@pytest.mark.slow
@pytest.mark.parametrize("name", list(LAYERS))
def test_two_ranks_equal_one_process(name, two_ranks):
    check(two_ranks.run(compare_layer, size=2, name=name, use_cache=True))


def refuse():
    """Try what a sequence over four ranks cannot have."""
    x, _ = tokens(1, 6)
    for name, shares, options, said in (
        ("smat", None, {"attention_mask": torch.ones(1, 6)}, "over 4 ranks pads no rows"),
        ("smat", None, {"cu_seqlens": torch.tensor([0, 6])}, "T = 24"),
        ("smat", [6, 6, 6, 5], {}, r"shares are \[6, 6, 6, 5\]"),
        ("mamba2", [2, 6, 6, 6], {}, "holds 2 tokens, but its neighbour looks back 3"),
    ):
        with smat.context_parallel(shares=shares) as ranks:
            own = x[:, :2] if shares and shares[ranks.rank] != 6 and name == "mamba2" else x
            if shares == [6, 6, 6, 5] and ranks.rank < 3:
                own = x[:, :4]
            with pytest.raises(ValueError, match=said):
                make(name)(own, **options)


def test_what_does_not_go_over_ranks_is_refused_with_numbers(four_ranks):
    four_ranks.run(refuse)
