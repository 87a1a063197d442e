"""bf16 over ranks is as far from fp64 as in one process: what ranks add up is added in fp32."""

import pytest
import torch

from tests.distributed.narrow_cases import compare_narrow
from tests.distributed.op_cases import compare_op
from tests.distributed.test_op import CASES
from tests.ops.smat.comparison import TOLERANCE

# The sum of a rank's heads is rounded once more than in one process, and a share has fewer numbers
# to average over than the whole: both stay well below another half of the error.
MORE = 1.5
# Of one process: a layer rounds to bf16 some eight times in a row, by up to 2^-9 each.
ALONE = 8 * 2**-9
LAYERS = ["softmax", "smat gated", "mamba2", "gated deltanet"]


@pytest.mark.parametrize("name", ["window", "routed window", "packed window", "recurrent decay"])
def test_the_op_over_ranks_holds_the_tolerance_of_bf16(name, two_ranks):
    case = {**CASES[name], "state": False}
    of_out, of_grads = TOLERANCE[torch.bfloat16]
    for errors in two_ranks.run(compare_op, size=2, uneven=True, dtype=torch.bfloat16, **case):
        assert errors.pop("out") < of_out
        assert max(errors.values()) < of_grads, errors


@pytest.mark.parametrize("name", LAYERS)
def test_mixers_over_ranks_are_as_exact_as_one_process(name, two_ranks):
    for errors in two_ranks.run(compare_narrow, size=2, name=name):
        for what, (alone, dealt, cut) in errors.items():
            assert alone < ALONE, (what, alone)
            assert max(dealt, cut) < MORE * alone, (what, alone, dealt, cut)
