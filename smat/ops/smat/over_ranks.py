"""SMat-Attention over ranks: own tiles, and what the ranks before left (Algorithm 1, cut in time).

A rank's queries see three kinds of keys: its own, of which the operator takes care under the mask
of these tokens alone; recent ones of ranks before, through the states of the open windows; distant
ones of ranks before, through tables of profiles. States and tables are sums over keys that decay
alike, so that one scan over ranks brings each rank what all before it wrote (`exchange.scan`), and
the adjoint of the scan takes their gradients back.
"""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor

from smat.distributed import Piece, Share
from smat.distributed.exchange import Carry, arrive, set_out, without_autocast
from smat.masks import SMatMask
from smat.masks.boundary import ShiftedBoundary
from smat.ops.smat.at_rows import map_features
from smat.ops.smat.carried import merge_groups
from smat.ops.smat.operator import run_operator
from smat.ops.smat.pieces import Carried, PieceTokens
from smat.ops.smat.routing import Gates, Options, Routing


def check_share(
    share: Share, padding: object, cu_seqlens: Tensor | None, keeps_state: bool
) -> None:
    """Refuse what a sequence over ranks cannot have."""
    if padding is not None:
        raise ValueError(f"{share.size} ranks hold one sequence: pack rows instead of padding them")
    if cu_seqlens is not None and keeps_state:
        raise ValueError("packed sequences over ranks leave no state to decode from")


@without_autocast
def attend_over_ranks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Gates,
    routing: Routing,
    cu_seqlens: Tensor | None,
    options: Options,
    share: Share,
    goes_on: bool = False,
) -> tuple[Tensor, Carried]:
    """Attend from a rank's own tokens to those of all ranks: out (B, T, H, V), and what came in.

    The tensors of the operator, on every rank its own; ``cu_seqlens`` counts the tokens of all.
    ``goes_on`` says that a state is wanted, for queries behind the sequence.
    """
    wide = torch.promote_types(v.dtype, torch.float32)
    types, weight = routing.query_type, routing.read_weight
    if types is not None and types.ndim == 3 and weight is not None:
        routing = routing._replace(query_type=types.unsqueeze(-1), read_weight=weight.unsqueeze(-1))
    phi, psi = (map_features(options.feature_map, x.to(wide)) for x in (q, k))
    if gates.key_gate is not None:
        psi = psi * gates.key_gate.to(wide).unsqueeze(-1)
    values = F.pad(v.to(wide), (0, 1), value=1.0) if options.normalize else v.to(wide)
    inputs = (phi, psi, values, gates._replace(key_gate=None), routing)
    inside = options._replace(feature_map="identity", normalize=False)
    pieces = share.pieces(None if cu_seqlens is None else cu_seqlens.tolist())

    def alone(piece: Piece) -> Options:
        """Return the options of a piece's whole sequence, which has a mask of its own if packed."""
        mask = options.mask if cu_seqlens is None else options.mask.for_length(piece.length)
        return inside._replace(mask=mask)

    first = last = PieceTokens(*inputs, alone(pieces[0]), pieces[0], goes_on)
    if len(pieces) > 1:
        last = PieceTokens(*inputs, alone(pieces[-1]), pieces[-1], goes_on)
    journey = set_out(_carries(first, last), share)  # while the rank attends to its own keys
    answers = []
    for is_whole, some in _runs(pieces):
        if is_whole and cu_seqlens is not None:
            answers.append(_attend_inside(*inputs, inside, some, packed=True))
        else:
            own = alone(some[0])
            own = own._replace(mask=_own_mask(own.mask, some[0]))
            answers.append(_attend_inside(*inputs, own, some))
    y = torch.cat(answers, 1)
    came, link = arrive(journey, y)
    begin = pieces[0].offset
    carried = Carried(first.schedule, begin, first.groups_at(begin), *came)
    if carried.groups.windows or carried.groups.tables:
        edge = pieces[0].stop
        y = torch.cat([y[:, :edge] + first.read(carried), y[:, edge:]], 1)
    y = y + link
    if not options.normalize:
        return y, carried
    total = y[..., -1:]
    nothing = total.abs() < torch.finfo(wide).tiny
    return y[..., :-1] / total.masked_fill(nothing, 1) * ~nothing, carried


def _runs(pieces: list[Piece]) -> list[tuple[bool, list[Piece]]]:
    """Put whole sequences that stand together into one call."""
    runs = itertools.groupby(enumerate(pieces), key=lambda x: -1 if x[1].is_whole else x[0])
    return [(number < 0, [piece for _, piece in run]) for number, run in runs]


def _attend_inside(
    phi: Tensor, psi: Tensor, v: Tensor, gates: Gates, routing: Routing, options: Options,
    pieces: list[Piece], packed: bool = False,
) -> Tensor:  # fmt: skip
    """Attend to the own keys of one piece, or of packed sequences: y (B, t, H, p)."""
    own, edges = slice(pieces[0].start, pieces[-1].stop), None
    if packed:
        starts = [piece.start - own.start for piece in pieces]
        edges = torch.tensor([*starts, own.stop - own.start], device=v.device)
    gates = Gates(*(x if x is None else x[:, own] for x in gates))
    routing = Routing(*(x if x is None else x[:, own] for x in routing))
    phi, psi, v = phi[:, own], psi[:, own], v[:, own]
    return run_operator(phi, psi, v, gates, routing, None, edges, options)


def _own_mask(mask: SMatMask, piece: Piece) -> SMatMask:
    """Return the mask of a piece's tokens among themselves."""
    if piece.offset == 0:
        return mask
    recipe = (mask.vc_dim, mask.chunk_size, mask.geometry.field_size)
    schedule = ShiftedBoundary(mask.schedule, piece.offset)
    return SMatMask(max(1, mask.seq_len - piece.offset), *recipe, schedule, _derived=True)


def _carries(first: PieceTokens, last: PieceTokens) -> list[Carry]:
    """Describe what comes in before the first piece, and what the last one leaves."""
    before, behind = first.groups_at(first.piece.offset), last.groups_at(last.piece.end)
    next_edge = last.schedule.segment_index(last.piece.end)
    written = last.states(behind.windows), last.tables(behind.tables)
    left = None if last.since is None else last.since[:, :, -1:]  # (B, H, 1, 1)
    steps = (left, left.unsqueeze(2) if left is not None and last.tables_decay else None)
    state = (*first.v.shape[:2], first.psi.shape[-1], first.v.shape[-1])
    table = (*state[:2], first.geometry.num_profiles, *state[2:])
    kinds = []
    for x, step, came, goes, shape in zip(
        written, steps, before, behind, (state, table), strict=True
    ):
        merge = merge_groups(came, goes, next_edge) if first is last else []
        kinds.append(Carry(x, step, merge, (len(came), *shape)))
    return kinds
