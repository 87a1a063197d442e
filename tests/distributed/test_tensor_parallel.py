"""Mixers and models with heads over ranks equal themselves in one process, in fp64."""

import pytest

from tests.distributed import model_cases
from tests.distributed.tensor_cases import (
    LAYERS_BY_NAME,
    WIDE,
    compare_heads,
    compare_heads_and_tokens,
    refuse,
)
from tests.distributed.test_op import check

QUICK = [
    "softmax learned", "routed mamba2 window", "routed mamba2 request", "wide mamba2", "one group",
    "routed mamba2 scored request", "routed deltanet",
    "deltanet", "log-linear mamba2", "log-linear deltanet", "mixture of memories", "wide smat",
    "smat content", "smat read gate",
]  # fmt: skip


@pytest.mark.parametrize("name", QUICK)
def test_heads_over_two_ranks_equal_one_process(name, two_ranks):
    check(two_ranks.run(compare_heads, name=name))


@pytest.mark.parametrize("name", ["wide smat", "routed mamba2", "routed deltanet"])
def test_packed_sequences_and_wanted_rows_with_heads_over_ranks(name, two_ranks):
    check(two_ranks.run(compare_heads, name=name, packed=[0, 3, 14, 22]))
    check(two_ranks.run(compare_heads, name=name, positions=[1, 20]))


def test_a_model_trains_saves_and_loads_with_heads_over_ranks(two_ranks):
    check_model(two_ranks.run(model_cases.compare_training))


def test_what_ranks_cannot_share_is_refused_with_numbers(two_ranks):
    two_ranks.run(refuse)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in LAYERS_BY_NAME if name not in QUICK])
def test_every_other_mixer_with_heads_over_two_ranks(name, two_ranks):
    check(two_ranks.run(compare_heads, name=name))


@pytest.mark.slow
@pytest.mark.parametrize("name", WIDE)
def test_heads_over_four_ranks_equal_one_process(name, four_ranks):
    check(four_ranks.run(compare_heads, name=name))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in LAYERS_BY_NAME if "learned" not in name])
def test_heads_and_tokens_over_four_ranks_equal_one_process(name, four_ranks):
    check(four_ranks.run(compare_heads_and_tokens, name=name))


@pytest.mark.slow
@pytest.mark.parametrize(("mixer", "options"), model_cases.OTHERS.items())
def test_other_models_train_with_heads_over_ranks(mixer, options, two_ranks):
    check_model(two_ranks.run(model_cases.compare_training, mixer=mixer, **options))


@pytest.mark.slow
def test_a_model_is_sharded_over_pairs_of_ranks_that_share_heads(four_ranks):
    check(four_ranks.run(model_cases.compare_sharded))


@pytest.mark.slow
def test_a_model_of_transformers_learns_and_generates_with_heads_over_ranks(two_ranks):
    pytest.importorskip("transformers")
    check(two_ranks.run(model_cases.compare_transformers))


def check_model(by_rank):
    check([errors for errors, _ in by_rank])
    assert max(part for _, part in by_rank) < 0.6, "ranks hold little less than all parameters"
