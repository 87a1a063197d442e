"""A decoder to be killed and to go on: run as a module with save or load, and paths."""

import os
import signal
import sys
import warnings

import torch

import smat

KILLED_AT, STOP = 230, 330


def make_mask():
    return smat.SMatMask(256, 3, 8, boundary=smat.schedules.window(64))


def start():
    return smat.SMatState.empty(make_mask(), batch=2, heads=2, key_dim=8, value_dim=8)


def go_on(state, first, stop):
    """Feed tokens that are the same in every process; return the outputs and the state."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 2, STOP, 2, 8, generator=generator)
    gates = -0.01 * torch.rand(2, STOP, 2, generator=generator)
    outs = []
    for t in range(first, stop):
        out, state = state.step(q[:, t], k[:, t], v[:, t], log_decay=gates[:, t], inplace=True)
        outs.append(out)
    return torch.stack(outs, 1), state


def save_and_die(path):
    _, state = go_on(start(), 0, KILLED_AT)
    assert state.built[0] > 0  # in the middle of a fold
    state.save(path)
    os.kill(os.getpid(), signal.SIGKILL)


def load_and_finish(path, out_path):
    state = smat.SMatState.load(path, make_mask())
    assert state.positions == [KILLED_AT] * 2
    out, _ = go_on(state, KILLED_AT, STOP)
    torch.save(out, out_path)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    {"save": save_and_die, "load": load_and_finish}[sys.argv[1]](*sys.argv[2:])
