"""Bytes that kernels move: a formula for each, and the least that the algorithm needs.

Loads count once a program, however often it repeats them (a program's own repetitions stay in its
first cache or its registers), and once for every program that makes them. The tests hold each
formula against the loads and stores that Triton's interpreter makes. Positional assignment only:
what content routing moves depends on the content.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from smat.ops.triton.launch import Launch

WORD, INDEX = 4, 8  # bytes of fp32 and of an int64


class Traffic(NamedTuple):
    """Bytes that are loaded and stored."""

    loads: int
    stores: int

    def __add__(self, other: object) -> Traffic:
        assert isinstance(other, Traffic)
        return Traffic(self.loads + other.loads, self.stores + other.stores)

    def __mul__(self, times: object) -> Traffic:
        assert isinstance(times, int)
        return Traffic(self.loads * times, self.stores * times)

    @property
    def total(self) -> int:
        """Both."""
        return self.loads + self.stores


class Chunk(NamedTuple):
    """A chunk of the causal branch, and a window's visits to chunks."""

    tokens: int
    windows: int  # that visit it


class Window(NamedTuple):
    """A window of the causal branch: its chunks and tokens, and those of its own segment."""

    chunks: int
    tokens: int
    own_chunks: int
    own_tokens: int


class Cuts(NamedTuple):
    """How the causal branch cuts a sequence, with values (a launch knows sizes alone)."""

    chunks: list[Chunk]
    windows: list[Window]

    @classmethod
    def of(cls, chunks: Tensor, windows: Tensor) -> Cuts:
        """Read the tables of a plan."""
        edges = chunks.tolist()
        found = []
        for first, own, end, _ in windows.tolist():
            stop = edges[end - 1][1]
            found.append(
                Window(end - first, stop - edges[first][0], end - own, stop - edges[own][0])
            )
        return cls([Chunk(stop - start, last - own + 1) for start, stop, own, last in edges], found)


class View:
    """A launch's arguments by name; sizes of elements, 0 for what is not there."""

    def __init__(self, launch: Launch) -> None:
        self.launch, self.given = launch, {**launch.arguments, **launch.meta}

    def __getattr__(self, name: str) -> Any:
        return self.given[name]

    def bytes_of(self, *names: str) -> int:
        """Bytes of an element of each tensor that is there, all together."""
        there = (self.given[name] for name in names)
        return sum(x.element_size() for x in there if x is not None)

    def has(self, name: str) -> bool:
        """Whether a tensor was given."""
        return self.given[name] is not None

    def tiles(self, size: str, block: str) -> int:
        """Count the blocks of a width."""
        return -(-self.given[size] // self.given[block])


def scan_bytes(x: View, cuts: Cuts) -> Traffic:
    """States before chunks, or their adjoints behind them: tokens in, states out."""
    tiles_k, tiles_v = x.tiles("K", "BLOCK_K"), x.tiles("V", "BLOCK_V")
    sums = x.K if x.has("state_sums") else 0
    loads = stores = 0
    for window in cuts.windows:
        tokens = window.own_tokens if x.REVERSE else window.tokens
        each = tiles_v * x.K * x.bytes_of("left") + tiles_k * x.V * x.bytes_of("right")
        each += tiles_k * tiles_v * x.bytes_of("scale", "column")
        numbers = 4 * INDEX + 2 * INDEX * window.chunks
        numbers += 2 * WORD * (window.tokens + 1) * x.has("cum")
        loads += x.GROUP * tokens * each + tiles_k * tiles_v * numbers
        stores += (
            WORD * (window.chunks if x.EVERY_VISIT else window.own_chunks) * (x.K * x.V + sums)
        )
    return Traffic(loads, stores) * (x.num_batch * x.num_heads)


def attend_bytes(x: View, cuts: Cuts) -> Traffic:
    """Outputs: q, k, v, states and the long range in, the output and its normaliser out."""
    tiles_v, length = x.tiles("V", "BLOCK_V"), sum(chunk.tokens for chunk in cuts.chunks)
    num_chunks, loads = len(cuts.chunks), 2 * INDEX * len(cuts.chunks) * x.tiles("V", "BLOCK_V")
    if x.LOCAL:
        features = x.K * x.bytes_of("q", "k") + x.bytes_of("key_gate")
        loads += length * (tiles_v * features + x.V * x.bytes_of("v"))
        loads += WORD * num_chunks * x.K * (x.V + tiles_v * x.NORMALIZE)
        loads += 2 * WORD * tiles_v * (length + num_chunks) * x.has("cum")
    if x.has("far"):
        loads += WORD * (length - x.first_far) * (x.V + tiles_v * x.NORMALIZE)
    stores = WORD * length * (x.V + x.NORMALIZE)
    return Traffic(loads, stores) * (x.launch.num_blocks // (num_chunks * tiles_v))


def division_bytes(x: View, cuts: Cuts) -> Traffic:
    """What the division asks of the backward pass: the output and its gradient in."""
    tokens = x.inverse.numel()
    return Traffic(tokens * (x.V * x.bytes_of("grad_out", "out") + WORD), 2 * WORD * tokens)


def query_key_bytes(x: View, cuts: Cuts) -> Traffic:
    """Gradients of queries, keys and gates: tokens, states and adjoints in."""
    tiles, found = x.tiles("K", "BLOCK_K"), Traffic(0, 0)
    for tokens, windows in cuts.chunks:
        numbers = x.V * x.bytes_of("v", "grad_out") + x.bytes_of("inverse", "delta", "key_gate")
        loads = 4 * INDEX + INDEX * windows + tokens * numbers
        loads += 2 * WORD * (tokens + 1) * x.has("cum")
        loads = tiles * loads + tokens * x.K * x.bytes_of("q", "k")
        loads += WORD * x.K * (x.V + x.has("inverse"))
        loads *= x.GROUP  # and once, of the heads that share a state, its adjoint
        loads += WORD * x.K * x.V * (windows + (windows - 1) * x.has("cum"))
        loads += WORD * x.K * (2 * windows - 1) * x.has("inverse")
        stores = tiles * tokens * (x.bytes_of("grad_gates", "grad_key_gate"))
        found += Traffic(loads, x.GROUP * (stores + 2 * WORD * tokens * x.K))
    return found * (x.launch.num_blocks // (len(cuts.chunks) * tiles * x.GROUP))


def value_bytes(x: View, cuts: Cuts) -> Traffic:
    """Gradients of values: tokens and adjoints in."""
    tiles, found = x.tiles("V", "BLOCK_V"), Traffic(0, 0)
    for tokens, windows in cuts.chunks:
        loads = 4 * INDEX + INDEX * windows + tokens * x.bytes_of("key_gate")
        loads += tokens * x.K * (x.bytes_of("k") + x.GROUP * x.bytes_of("q"))
        loads += x.GROUP * tokens * x.bytes_of("inverse") + 2 * WORD * (tokens + 1) * x.has("cum")
        loads *= tiles
        loads += x.GROUP * tokens * x.V * x.bytes_of("grad_out") + WORD * windows * x.K * x.V
        found += Traffic(loads, WORD * tokens * x.V)
    return found * (x.launch.num_blocks // (len(cuts.chunks) * tiles))


def pool_bytes(x: View, cuts: Cuts) -> Traffic:
    """Tables: tokens in, one state an entry out; onto an earlier table, that in too."""
    tiles_k, tiles_v = x.tiles("K", "BLOCK_K"), x.tiles("V", "BLOCK_V")
    num_rows = x.launch.num_blocks // (x.num_blocks * tiles_k * tiles_v)
    visits, each = (x.stop - x.start) * x.HEADS, tiles_v * x.K * x.bytes_of("left")
    each += tiles_k * x.V * x.bytes_of("right")
    each += tiles_k * tiles_v * x.bytes_of("scale", "weight", "last")
    loads, stores = visits * each, x.num_blocks * WORD * x.K * (x.V + x.SUMS)
    if x.ONTO:
        loads += x.num_blocks * WORD * x.K * (x.V + tiles_v * x.SUMS)
        loads += x.num_blocks * tiles_k * tiles_v * x.bytes_of("over_move")
    return Traffic(loads, stores) * num_rows


def read_bytes(x: View, cuts: Cuts) -> Traffic:
    """Answers: queries and one state an entry in."""
    tiles, num_visits = x.tiles("V", "BLOCK_V"), (x.stop - x.start) * x.HEADS
    entries, sums = min(x.num_groups, x.stop - x.start), x.has("sums")
    each = tiles * (x.K * x.bytes_of("left") + x.bytes_of("scale", "weight")) + WORD * x.V * x.ADD
    loads = num_visits * each + entries * WORD * x.K * (x.V + tiles * sums)
    stores = num_visits * WORD * (x.V + sums)
    return Traffic(loads, stores) * (x.launch.num_blocks // (x.num_blocks * tiles))


def pull_bytes(x: View, cuts: Cuts) -> Traffic:
    """Gradients of queries or keys: what stood on the other side, and one state an entry in."""
    tiles, num_visits = x.tiles("K", "BLOCK_K"), (x.stop - x.start) * x.HEADS
    entries = min(x.num_groups, x.stop - x.start)
    each = tiles * (x.V * x.bytes_of("right") + x.bytes_of("scale", "weight"))
    each += tiles * x.bytes_of("last") * x.SUMS + x.K * (x.bytes_of("left") + WORD * x.ADD)
    loads = num_visits * each + entries * WORD * x.K * (x.V + x.SUMS)
    stores = num_visits * WORD * (x.K + tiles * x.has("dots"))
    return Traffic(loads, stores) * (x.launch.num_blocks // (x.num_blocks * tiles))


def shear_bytes(x: View, cuts: Cuts) -> Traffic:
    """One coordinate of a tabulation, or of its adjoint: a table in, a table out."""
    entries, next_entries = x.others * x.Q**2, x.others * x.Q * x.SUMS
    column = Traffic(
        WORD * (entries + next_entries * x.ADJOINT),
        WORD * (entries + next_entries * (not x.ADJOINT)),
    )
    return column * (len(x.source) * x.num_columns)


def step_bytes(x: View, cuts: Cuts) -> Traffic:
    """One token, behind the boundary: the states that it touches in and, but for types, out."""
    state, has_lambda = WORD * x.K * (x.V + x.NORMALIZE), x.has("lam")
    loads = 4 * INDEX + x.K * (x.bytes_of("k") + x.GROUP * x.bytes_of("q")) + x.V * x.bytes_of("v")
    loads += x.bytes_of("log_decay", "key_gate", "write_weight", "profile")
    loads += x.GROUP * x.READS * x.bytes_of("query_type", "read_weight")
    loads += 2 * INDEX * (2 * has_lambda + x.has("profile_lam"))
    types = x.GROUP if x.has("query_type") else 1  # heads of a group read the same type
    loads += state * (x.SLOTS + x.has("profile_table") + types * x.READS * x.has("type_table"))
    stores = INDEX + 2 * INDEX * (has_lambda * x.has("log_decay") + x.has("profile_lam"))
    stores += state * (x.SLOTS + x.has("profile_table")) + x.GROUP * x.V * x.bytes_of("out")
    return Traffic(loads, stores) * x.launch.num_blocks


FORMULAS: dict[str, Callable[[View, Cuts], Traffic]] = {
    "scan_states": scan_bytes,
    "attend_chunks": attend_bytes,
    "prepare_division": division_bytes,
    "query_key_grads": query_key_bytes,
    "value_grads": value_bytes,
    "pool_kernel": pool_bytes,
    "read_kernel": read_bytes,
    "pull_kernel": pull_bytes,
    "shear_kernel": shear_bytes,
    "step_kernel": step_bytes,
}


def bytes_of(launch: Launch, cuts: Cuts) -> Traffic:
    """Evaluate the formula of a launch's kernel."""
    return FORMULAS[launch.name](View(launch), cuts)
