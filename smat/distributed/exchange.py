"""What ranks hand to each other, and the adjoint of it: halos, carries, totals.

Every function here is called by all ranks of a share, in the same order, and so is its adjoint.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from threading import Thread
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from smat.distributed.shares import Piece, Share

FORWARD, BACKWARD = 1, -1  # to the next rank, to the one before
Made = TypeVar("Made")


def without_autocast(function: Callable[..., Made]) -> Callable[..., Made]:
    """Let a function keep its own dtypes: a product in bf16 would be no state of another rank."""

    @functools.wraps(function)
    def run(*given: Any, **named: Any) -> Made:
        with ExitStack() as off:
            for device in ("cpu", "cuda", "xpu"):
                if torch.is_autocast_enabled(device):
                    off.enter_context(torch.autocast(device, enabled=False))
            return function(*given, **named)

    return run


def _pass_on(share: Share, kind: str, outgoing: Tensor | None, incoming: Tensor, way: int) -> None:
    """Send a flat tensor one rank on, and receive that of the rank before; none at the ends."""
    source, target = share.rank - way, share.rank + way
    works = []
    if outgoing is not None and 0 <= target < share.size and outgoing.numel():
        works.append(dist.isend(outgoing, _global(share, target), group=share.group))
        share.sent[kind] += outgoing.numel() * outgoing.element_size()
    if 0 <= source < share.size and incoming.numel():
        works.append(dist.irecv(incoming, _global(share, source), group=share.group))
    for work in works:
        assert work is not None
        work.wait()


def _global(share: Share, rank: int) -> int:
    return rank if share.group is None else dist.get_global_rank(share.group, rank)


class _Shift(torch.autograd.Function):
    """Hand a tensor to the next rank; the first rank receives zeros."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, share: Share) -> Tensor:
        ctx.share, received = share, torch.zeros_like(x, memory_format=torch.contiguous_format)
        _pass_on(share, "halo", x.contiguous(), received, FORWARD)
        return received

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        received = torch.zeros_like(grad, memory_format=torch.contiguous_format)
        _pass_on(ctx.share, "halo", grad.contiguous(), received, BACKWARD)
        return received, None


def inputs_before(x: Tensor, count: int, share: Share) -> Tensor:
    """Return the `count` tokens before a rank's own (B, T, ...), zeros before the first of all."""
    shortest = min(b - a for a, b in zip(share.edges, share.edges[1:], strict=False))
    if shortest < count:
        raise ValueError(
            f"a rank holds {shortest} tokens, but its neighbour looks back {count}: "
            f"shares are {[b - a for a, b in zip(share.edges, share.edges[1:], strict=False)]}"
        )
    return _Shift.apply(x[:, x.shape[1] - count :], share)


def _add(x: Tensor, share: Share, kind: str) -> Tensor:
    """Add up over ranks, in fp32 or wider."""
    wide = torch.promote_types(x.dtype, torch.float32)
    added = x.to(wide, copy=True, memory_format=torch.contiguous_format)
    dist.all_reduce(added, group=share.group)
    share.sent[kind] += added.numel() * added.element_size()
    return added.to(x.dtype)


class _Total(torch.autograd.Function):
    """Add up over ranks; the gradients of all ranks' sums are added up too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, share: Share) -> Tensor:
        ctx.share = share
        return _add(x, share, "total")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _Total.forward(ctx, grad, ctx.share), None


def total(x: Tensor, share: Share | None) -> Tensor:
    """Sum a tensor over the ranks of a share."""
    return x if share is None else _Total.apply(x, share)


class _Gather(torch.autograd.Function):
    """Lay the tokens (B, T, ...) of all ranks side by side."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, share: Share) -> Tensor:
        ctx.share = share
        whole = x.new_zeros(len(x), share.total, *x.shape[2:])
        share.cut(whole).copy_(x)
        dist.all_reduce(whole, group=share.group)  # shares may differ, which gathering refuses
        share.sent["gather"] += whole.numel() * whole.element_size()
        return whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.share.cut(_add(grad, ctx.share, "gather")), None


def gather(x: Tensor, share: Share) -> Tensor:
    """Return the tokens (B, T, ...) of all ranks."""
    return _Gather.apply(x, share)


class Carry(NamedTuple):
    """How one kind of state goes over a rank: carry' = merge (transition carry) + written.

    States are (groups, ..., a, b). A transition is what a rank's tokens leave of every earlier
    state: numbers (..., 1, 1), or matrices (..., a, a). `merge` has a pair (group behind the rank,
    group before it) for every group that goes on.
    """

    written: Tensor  # by this rank, as the next rank groups it
    transition: Tensor | None  # None is 1
    merge: Sequence[tuple[int, int]]
    before: tuple[int, ...]  # the shape of the states that come in

    def go_on(self, state: Tensor) -> Tensor:
        """Take incoming states over this rank."""
        behind = list(self.written.unbind())
        for target, source in self.merge:
            behind[target] = behind[target] + _apply(self.transition, state[source])
        return torch.stack(behind) if behind else self.written


def _apply(transition: Tensor | None, state: Tensor) -> Tensor:
    if transition is None:
        return state
    return transition * state if transition.shape[-1] == 1 else transition @ state


class Journey(NamedTuple):
    """States on their way from rank to rank, while this rank works on its own tokens."""

    kinds: Sequence[Carry]
    share: Share
    came: Callable[[], list[Tensor]]  # waits for the states that come in


def _begin(kinds: Sequence[Carry], share: Share) -> Future[list[Tensor]]:
    """Pass states on in a thread that does not keep a process alive whose rank has failed."""
    future: Future[list[Tensor]] = Future()

    def run() -> None:
        try:
            future.set_result(_pass_states(kinds, share))
        except Exception as error:
            future.set_exception(error)

    Thread(target=run, daemon=True).start()
    return future


def set_out(kinds: Sequence[Carry], share: Share) -> Journey:
    """Let states begin their way; `arrive` waits for those that come in.

    Each rank waits for the one before it, adds what it wrote itself and sends the sum on: a state
    crosses every edge once, in each direction. On a CPU another thread does so meanwhile.
    """
    detached = [
        kind._replace(
            written=kind.written.detach(),
            transition=None if kind.transition is None else kind.transition.detach(),
        )
        for kind in kinds
    ]
    if share.size > 1 and kinds[0].written.device.type == "cpu":
        return Journey(kinds, share, _begin(detached, share).result)
    came = _pass_states(detached, share)
    return Journey(kinds, share, lambda: came)


@torch.no_grad()
def _pass_states(kinds: Sequence[Carry], share: Share) -> list[Tensor]:
    before = _receive(share, [kind.before for kind in kinds], kinds[0].written, FORWARD)
    behind = [kind.go_on(state) for kind, state in zip(kinds, before, strict=True)]
    _send(share, behind, FORWARD)
    return before


class _Scan(torch.autograd.Function):
    """Receive states; the adjoints of what was received go back from rank to rank."""

    @staticmethod
    def forward(ctx: Any, journey: Journey, anchor: Tensor, *tensors: Any) -> Any:
        ctx.share, ctx.merges = journey.share, [kind.merge for kind in journey.kinds]
        written, transitions = tensors[: len(ctx.merges)], tensors[len(ctx.merges) :]
        before = journey.came()
        ctx.shapes = [x.shape for x in written]
        ctx.save_for_backward(*before, *transitions)
        return (*before, written[0].new_zeros(()))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        saved = ctx.saved_tensors
        states, transitions = saved[: len(ctx.merges)], saved[len(ctx.merges) :]
        pulled = _receive(ctx.share, ctx.shapes, grads[0], BACKWARD)
        sent, grad_transitions = [], []
        for merge, state, step, own, grad in zip(
            ctx.merges, states, transitions, grads, pulled, strict=False
        ):
            back, by_step = list(own.unbind()), None if step is None else torch.zeros_like(step)
            for target, source in merge:
                if by_step is not None:
                    x, y = grad[target], state[source]
                    moved = x * y if step.shape[-1] == 1 else x @ y.mT
                    by_step += moved.sum_to_size(step.shape)
                back[source] = back[source] + _apply(
                    None if step is None else step.mT, grad[target]
                )
            sent.append(torch.stack(back) if back else own)
            grad_transitions.append(by_step)
        _send(ctx.share, sent, BACKWARD)
        return None, None, *pulled, *grad_transitions


def _send(share: Share, states: Sequence[Tensor], way: int) -> None:
    nothing = states[0].new_empty(0)
    _pass_on(share, "carry", torch.cat([x.reshape(-1) for x in states]), nothing, way)


def _receive(share: Share, shapes: Sequence[Sequence[int]], like: Tensor, way: int) -> list[Tensor]:
    sizes = [torch.Size(shape).numel() for shape in shapes]
    flat = like.new_zeros(sum(sizes))
    _pass_on(share, "carry", None, flat, way)
    return [x.view(*shape) for x, shape in zip(flat.split(sizes), shapes, strict=True)]


def scan_rows(
    kinds: Sequence[tuple[Tensor, Tensor]], share: Share, pieces: Sequence[Piece] | None = None
) -> tuple[list[Tensor], Tensor]:
    """Scan states (B, ...) that rows write, with their transitions; see `scan`.

    Rows are those of a batch that all ranks hold, or the `pieces` that this rank holds of packed
    sequences: then the last one's state goes on, and the first one's comes in.
    """
    goes_on = pieces is None or (len(pieces) == 1 and pieces[0].offset > 0)
    comes_in = pieces is None or pieces[0].offset > 0
    rows = slice(None) if pieces is None else slice(-1, None)
    merge = [(0, 0)] if goes_on else []
    carries = [
        Carry(written[rows].unsqueeze(0), step[rows], merge, (1, *written[rows].shape))
        for written, step in kinds
    ]
    found, link = scan(carries, share, kinds[0][0])
    states = [
        torch.cat([state[0] * comes_in, torch.zeros_like(written[1:])]) if pieces else state[0]
        for state, (written, _) in zip(found, kinds, strict=True)
    ]
    return states, link


def scan(kinds: Sequence[Carry], share: Share, anchor: Tensor) -> tuple[list[Tensor], Tensor]:
    """Bring in the states of the ranks before at once: `set_out`, then `arrive`."""
    return arrive(set_out(kinds, share), anchor)


def arrive(journey: Journey, anchor: Tensor) -> tuple[list[Tensor], Tensor]:
    """Return the states that come in from the ranks before, of every kind, and a 0.

    The 0 belongs into the output of every rank, also of one that reads no state, and `anchor` is
    anything that has a gradient on every rank, also on one that writes none: so all take part in
    the backward pass.
    """
    kinds = journey.kinds
    written, steps = [kind.written for kind in kinds], [kind.transition for kind in kinds]
    found = _Scan.apply(journey, anchor, *written, *steps)
    return list(found[:-1]), found[-1]
