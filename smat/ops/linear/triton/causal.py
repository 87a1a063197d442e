"""The causal branch on a GPU: how its kernels are launched (equation 8, adjoint 12)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from smat.masks import Segment
from smat.ops.linear import plan as planning
from smat.ops.linear.triton.divided import prepare_division
from smat.ops.linear.triton.outputs import attend_chunks
from smat.ops.linear.triton.query_key_grads import query_key_grads
from smat.ops.linear.triton.states import scan_states
from smat.ops.linear.triton.value_grads import value_grads
from smat.ops.triton.launch import dot_precision, launch

PULLED = ("q", "k", "log_decay", "key_gate")  # in the order of the kernel


class Causal:
    """The causal branch of one sequence, whose tensors stay in the caller's layout.

    q (B, T, Hq, K), k (B, T, Hk, K), v (B, T, Hv, V), key_gate (B, T, Hk), sums of gates as
    `sum_gates` makes them. GROUP heads of queries share a key and a value, or SHARE heads of values
    share a key and a query.
    """

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_gate: Tensor | None,
        cum: Tensor | None,
        segments: Sequence[Segment],
        feature_map: str,
        normalize: bool,
    ) -> None:
        self.q, self.k, self.v = (along_rows(x) for x in (q, k, v))
        self.key_gate, self.cum, self.normalize = key_gate, cum, normalize
        chunk = planning.chunk_of(v.dtype)
        self.plan = planning.make_plan(tuple(segments), chunk, q.device)
        self.heads = max(q.shape[2], v.shape[2])
        key_dim, value_dim = k.shape[-1], v.shape[-1]
        self.sizes: dict[str, Any] = {
            "K": key_dim, "V": value_dim, "MAP": feature_map, "CHUNK": chunk,
            "GROUP": self.heads // v.shape[2], "SHARE": v.shape[2] // k.shape[2],
            "PRECISION": dot_precision(v), "num_stages": 2,
        }  # fmt: skip

    def _blocks(self, most_k: int, most_v: int) -> tuple[dict[str, Any], int, int]:
        """Cut features and columns into blocks of at most so many: all sizes, how many of each."""
        block_k, block_v = block_of(self.sizes["K"], most_k), block_of(self.sizes["V"], most_v)
        sizes = {**self.sizes, "BLOCK_K": block_k, "BLOCK_V": block_v}
        return sizes, triton.cdiv(sizes["K"], block_k), triton.cdiv(sizes["V"], block_v)

    def scan(
        self, left: Tensor, right: Tensor, scale: Tensor | None, column: Tensor | None,
        reverse: bool, every_visit: bool,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """Find the states (B, Hv, slots, K, V) and their column of the normaliser."""
        batch, _, heads, value_dim = self.v.shape
        num_slots = self.plan.num_visits if every_visit else len(self.plan.chunks)
        states = self.v.new_empty(
            batch, heads, num_slots, left.shape[-1], value_dim, dtype=torch.float32
        )
        sums = states.new_empty(states.shape[:4]) if self.normalize else None
        # Products of fp32 are made in three parts, which take registers.
        sizes, k_blocks, v_blocks = self._blocks(64, 32 if self.v.dtype == torch.float32 else 64)
        if not reverse:
            sizes["GROUP"] = 1
        launch(
            scan_states, len(self.plan.windows) * batch * heads * k_blocks * v_blocks,
            *strided(left, right, scale, column, self.cum), *self.plan[:2], states, sums,
            batch, heads, num_slots, **sizes,
            REVERSE=reverse, EVERY_VISIT=every_visit,
        )  # fmt: skip
        return states, sums

    def attend(
        self, far: tuple[int, Tensor, Tensor | None] | None, local: bool, out: Tensor, norm: Tensor
    ) -> None:
        """Write the output (B, T, H, V), divided, and the normaliser (B, T, H)."""
        states, sums = (
            self.scan(self.k, self.v, self.key_gate, None, reverse=False, every_visit=False)
            if local
            else (None, None)
        )
        first, y, z = far or (0, None, None)
        num_chunks = len(self.plan.chunks)
        sizes, _, v_blocks = self._blocks(32, 64)
        launch(
            attend_chunks, len(out) * self.heads * num_chunks * v_blocks,
            *strided(self.q, self.k, self.v, self.key_gate, self.cum), self.plan.chunks,
            states, sums, *strided(y, z), first, *strided(out, norm), self.heads, num_chunks,
            **sizes, LOCAL=local, NORMALIZE=self.normalize,
        )  # fmt: skip

    def backward(
        self, grad_out: Tensor, inverse: Tensor | None, delta: Tensor | None,
        grads: dict[str, Tensor],
    ) -> None:  # fmt: skip
        """Write the gradients of q, k, v and of those gates there are, given 1 / s and g . o."""
        batch = len(self.k)
        states, sums = self.scan(
            self.k, self.v, self.key_gate, None, reverse=False, every_visit=True
        )
        adjoints, adjoint_sums = self.scan(
            self.q, grad_out, inverse, delta, reverse=True, every_visit=True
        )
        num_chunks, num_visits = len(self.plan.chunks), self.plan.num_visits
        answers = (0, 0, 0) if inverse is None else inverse.stride()
        sizes, k_blocks, _ = self._blocks(32, self.sizes["CHUNK"] // 2)
        parts = {name: self._in_parts(name, grads, k_blocks) for name in PULLED}
        num_blocks = batch * num_chunks
        launch(
            query_key_grads, num_blocks * self.heads * k_blocks,
            *strided(self.q, self.k, self.v, self.key_gate, self.cum, grad_out), inverse, delta,
            answers, *self.plan[:2], states, sums, adjoints, adjoint_sums,
            *strided(*parts.values()), self.heads, num_chunks, num_visits, **sizes,
        )  # fmt: skip
        for name, part in parts.items():
            if part is not None and part is not grads[name]:
                by_head = part if name in "qk" else part.flatten(2)
                torch.sum(by_head.unflatten(2, (grads[name].shape[2], -1)), 3, out=grads[name])
        sizes, _, v_blocks = self._blocks(32, 64 if self.sizes["K"] <= 64 else 32)
        launch(
            value_grads, num_blocks * self.v.shape[2] * v_blocks,
            *strided(self.q, self.k, self.key_gate, self.cum, grad_out), inverse, answers,
            *self.plan[:2], adjoints, *strided(grads["v"]), self.v.shape[2], num_chunks, num_visits,
            **sizes,
        )  # fmt: skip

    def _in_parts(self, name: str, grads: dict[str, Tensor], k_blocks: int) -> Tensor | None:
        """Make room for what every head of answers, and block of features of gates, contributes."""
        grad = grads.get(name)
        if grad is None or (name in "qk" and grad.shape[2] == self.heads):
            return grad
        width = grad.shape[3] if name in "qk" else k_blocks
        return grad.new_empty(*grad.shape[:2], self.heads, width)


def divide_backward(grad_out: Tensor, out: Tensor, normalizer: Tensor) -> tuple[Tensor, Tensor]:
    """Find 1 / s, or 0, and grad_out . o, each (B, T, H)."""
    batch, length, heads, value_dim = out.shape
    inverse, delta = (out.new_empty(batch, length, heads) for _ in range(2))
    rows = 32
    launch(
        prepare_division, batch * triton.cdiv(length, rows) * heads,
        *strided(grad_out, out, normalizer), inverse, delta, length, heads,
        V=value_dim, ROWS=rows, BLOCK_V=block_of(value_dim, 64),
    )  # fmt: skip
    return inverse, delta


def along_rows(x: Tensor) -> Tensor:
    """Lay the last dimension out without gaps, which kernels rely on."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def block_of(size: int, most: int) -> int:
    """Choose how many of so many features or columns are in a tile."""
    return max(16, min(most, triton.next_power_of_2(size)))


def strided(*tensors: Tensor | None) -> list[Any]:
    """List tensors as kernels take them, each followed by its strides."""
    return [part for x in tensors for part in (x, (0, 0, 0) if x is None else x.stride())]
