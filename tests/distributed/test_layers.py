"""Every mixer over ranks equals itself in one process, in fp64."""

import pytest
import torch

import smat
from tests.distributed.layer_cases import compare_layer
from tests.distributed.test_op import check
from tests.layers.mixers import LAYERS, make, tokens

MIXERS = [name for name in LAYERS if name != "mixture of memories"]
PACKED = [0, 3, 4, 17]


@pytest.mark.parametrize("name", MIXERS)
def test_two_ranks_equal_one_process(name, two_ranks):
    check(two_ranks.run(compare_layer, size=2, name=name, use_cache=True))


@pytest.mark.parametrize("name", MIXERS)
def test_four_ranks_equal_one_process(name, four_ranks):
    check(four_ranks.run(compare_layer, size=4, name=name, use_cache=True))


@pytest.mark.parametrize("name", MIXERS)
def test_packed_sequences_over_four_ranks_equal_one_process(name, four_ranks):
    check(four_ranks.run(compare_layer, size=4, name=name, packed=PACKED))
