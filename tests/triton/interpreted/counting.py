"""Count the bytes that kernels load and store in the interpreter."""

from contextlib import ExitStack, contextmanager
from unittest import mock

import numpy as np
from triton.runtime import interpreter

from smat.bench.traffic import Traffic


class Counter:
    """Addresses that programs touch; those of one program count once."""

    def __init__(self):
        self.launches = []
        self.loaded, self.stored = [], []

    def note(self, touched, pointers, mask):
        size = interpreter._get_np_dtype(pointers.get_element_ty()).itemsize
        addresses = pointers.data if mask is None else pointers.data[mask.data.astype(bool)]
        touched.append((size, np.asarray(addresses).reshape(-1)))

    def end_program(self):
        if self.launches:
            found = Traffic(_distinct(self.loaded), _distinct(self.stored))
            self.launches[-1] = self.launches[-1] + found
        self.loaded, self.stored = [], []


def _distinct(touched):
    sizes = {size for size, _ in touched}
    return sum(
        size * len(np.unique(np.concatenate([x for own, x in touched if own == size])))
        for size in sizes
    )


@contextmanager
def count_bytes():
    """Give a list that has the traffic of every launch, once the block is left."""
    counter, builder = Counter(), interpreter.interpreter_builder
    load, store = builder.create_masked_load, builder.create_masked_store
    move, run = builder.set_grid_idx, interpreter.GridExecutor.__call__

    def counted_load(pointers, mask, *rest):
        counter.note(counter.loaded, pointers, mask)
        return load(pointers, mask, *rest)

    def counted_store(pointers, value, mask, *rest):
        counter.note(counter.stored, pointers, mask)
        return store(pointers, value, mask, *rest)

    def next_program(*index):
        counter.end_program()
        return move(*index)

    def next_launch(self, *args, **kwargs):
        counter.end_program()
        counter.launches.append(Traffic(0, 0))
        return run(self, *args, **kwargs)

    with ExitStack() as stack:
        for name, function in (
            ("create_masked_load", counted_load),
            ("create_masked_store", counted_store),
            ("set_grid_idx", next_program),
        ):
            stack.enter_context(mock.patch.object(builder, name, function))
        stack.enter_context(mock.patch.object(interpreter.GridExecutor, "__call__", next_launch))
        yield counter.launches
        counter.end_program()
