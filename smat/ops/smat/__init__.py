"""SMat-Attention: the op, its two branches, and the state that decodes."""

from smat.ops.smat.decode import SMatState
from smat.ops.smat.interface import smat_attention, smat_attention_at
from smat.ops.smat.reference import reference_attention

__all__ = ["SMatState", "reference_attention", "smat_attention", "smat_attention_at"]
