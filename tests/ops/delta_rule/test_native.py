"""What is particular to the native kernels of the delta rule; its other tests run on them too."""

from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch

from smat.ops.delta_rule import delta_rule, transport_queries
from smat.ops.delta_rule.native import rule
from tests.ops.delta_rule.test_delta_rule import NAMES, assert_same, make_inputs, run

LIMITS = {torch.float64: (1e-12, 1e-10), torch.float32: (1e-5, 1e-4)}


@pytest.fixture(autouse=True)
def native_alone(rule_backend):
    if rule_backend != "native":
        pytest.skip("about the native kernels alone")


@pytest.mark.parametrize("missing", [None, rule.SOURCE, rule.BACKWARD_SOURCE])
def test_kernels_run_where_they_are_there_and_torch_where_they_are_not(missing):
    inputs, load = make_inputs(70), rule.load
    with (
        mock.patch.object(rule, "load", lambda source: None if source == missing else load(source)),
        mock.patch.object(rule, "_run", wraps=rule._run) as kernels,
    ):
        assert_same(inputs, *LIMITS[torch.float64])
    expected = {rule.SOURCE, rule.BACKWARD_SOURCE} - {missing}
    assert {call.args[0] for call in kernels.call_args_list} == expected


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize(("key_dim", "value_dim"), [(1, 1), (7, 33), (20, 17), (64, 48)])
@pytest.mark.parametrize(("seq_len", "chunk_size"), [(33, 32), (200, 64), (300, 256)])
def test_widths_of_no_vector_and_chunks_of_several_tiles(
    dtype, key_dim, value_dim, seq_len, chunk_size
):
    inputs = make_inputs(seq_len, batch=1, key_dim=key_dim, value_dim=value_dim, dtype=dtype)
    assert_same(inputs, *LIMITS[dtype], chunk_size=chunk_size)


def test_any_layout_of_the_inputs():
    inputs = make_inputs(50)
    expected = run(delta_rule, inputs, output_final_state=True)
    axes = {3: (2, 0, 1), 4: (3, 1, 0, 2)}
    strided = {}
    for name, x in inputs.items():
        order = axes[x.ndim]
        back = [order.index(axis) for axis in range(x.ndim)]
        strided[name] = x.detach().permute(order).contiguous().permute(back).requires_grad_()
        assert not strided[name].is_contiguous()
    found = run(delta_rule, strided, output_final_state=True)
    for name, x in expected.items():
        torch.testing.assert_close(found[name], x, rtol=0, atol=0, msg=name)


def large():
    """A call that is worth several threads."""
    return make_inputs(512, heads=3, key_dim=64, value_dim=64, dtype=torch.float32)


def test_the_same_numbers_from_any_number_of_threads():
    inputs, before, found = large(), torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(run(delta_rule, inputs, output_final_state=True))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(other[name], x) for name, x in found[0].items())


def test_four_threads_of_a_caller():
    inputs = {name: x.detach() for name, x in large().items()}
    expected, _ = delta_rule(**inputs)
    with ThreadPoolExecutor(4) as pool:
        found = pool.map(lambda _: delta_rule(**inputs)[0], range(8))
        assert all(torch.equal(out, expected) for out in found)


def test_a_state_that_is_only_multiplied_has_no_values():
    inputs = make_inputs(70)
    q, k, _, beta, log_decay, _ = (inputs[name] for name in NAMES)
    out, state = transport_queries(q, k, beta, log_decay, output_final_transition=True)
    eye = torch.eye(5, dtype=q.dtype).expand(2, 2, 5, 5)
    expected = delta_rule(q, k, 0 * k, beta, log_decay, initial_state=eye, output_final_state=True)
    torch.testing.assert_close((out, state), expected, rtol=0, atol=1e-13)
