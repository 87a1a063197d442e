"""SMat-Attention over ranks equals that of one process, in fp64."""

import pytest

from tests.distributed.op_cases import compare_op

TOLERANCE = 1e-10
CASES = {
    "plain": {"length": 40},
    "d = 1": {"length": 21, "vc_dim": 1, "gates": "mild"},
    "d = 2": {"length": 33, "vc_dim": 2, "gates": "mild"},
    "d = 4": {"length": 40, "vc_dim": 4, "schedule": "kept"},
    "kept": {"length": 30, "schedule": "kept", "gates": "mild", "state": True},
    "window": {"length": 41, "schedule": "window", "gates": "mild", "state": True},
    "wide window": {"length": 45, "schedule": "wide window", "gates": "mixed", "state": True},
    "doubling": {"length": 37, "schedule": "doubling", "gates": "mild", "state": True},
    "no boundary": {"length": 19, "schedule": "none", "state": True},
    "strong gates": {"length": 40, "gates": "mixed", "state": True},
    "routed": {"length": 40, "routed": "one", "gates": "mild", "state": True},
    "several reads": {"length": 39, "routed": "several", "gates": "mild"},
    "routed window": {"length": 43, "schedule": "window", "routed": "several", "state": True},
    "shared keys": {"length": 40, "group": 3, "routed": "several", "gates": "mild"},
    "shared queries": {"length": 40, "group": 3, "sharing": "values", "gates": "mild"},
    "recurrent decay": {"length": 36, "schedule": "window", "gates": "mild", "state": True,
                        "options": {"decay_scope": "recurrent"}},
    "weighed d = 1": {"length": 36, "vc_dim": 1, "schedule": "window", "routed": "several",
                      "gates": "mild", "state": True},
    "no normaliser": {"length": 36, "gates": "mild", "options": {
        "normalize": False, "feature_map": "identity"}},
    "long range": {"length": 36, "gates": "mild", "options": {
        "branch": "long_range", "normalize": False}},
    "causal": {"length": 36, "schedule": "window", "gates": "mild", "state": True,
               "options": {"branch": "causal"}},
    "relu": {"length": 36, "options": {"feature_map": "relu"}},
    "favor": {"length": 36, "options": {"feature_map": "favor"}},
    "packed": {"length": 60, "packed": [0, 7, 19, 41, 41, 46, 60], "gates": "mild"},
    "packed window": {"length": 60, "packed": [0, 30, 60], "schedule": "window", "gates": "mild"},
    "packed routed": {"length": 60, "packed": [0, 3, 55, 60], "routed": "several"},
    "packed many": {"length": 60, "packed": [0, *range(4, 60, 5), 60], "schedule": "window"},
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_four_uneven_ranks_equal_one_process(name, four_ranks):
    check(four_ranks.run(compare_op, size=4, uneven=True, **CASES[name]))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_four_equal_ranks_equal_one_process(name, four_ranks):
    check(four_ranks.run(compare_op, size=4, **CASES[name]))


@pytest.mark.slow
@pytest.mark.parametrize("uneven", [False, True], ids=["equal", "uneven"])
@pytest.mark.parametrize("name", CASES)
def test_two_ranks_equal_one_process(name, uneven, two_ranks):
    check(two_ranks.run(compare_op, size=2, uneven=uneven, **CASES[name]))


def check(by_rank):
    for rank, errors in enumerate(by_rank):
        wrong = {name: error for name, error in errors.items() if not error < TOLERANCE}
        assert not wrong, f"rank {rank}: {wrong}"
