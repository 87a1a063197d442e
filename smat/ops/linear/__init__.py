"""Chunked linear attention with decay: the causal branch, which stands alone."""

from smat.ops.linear.causal import causal, causal_backward
from smat.ops.linear.decay import LogDecay

__all__ = ["LogDecay", "causal", "causal_backward"]
