"""Operations on features and values; none owns a parameter."""

from smat.ops.decode import SMatState
from smat.ops.interface import smat_attention, smat_attention_at
from smat.ops.reference import reference_attention

__all__ = ["SMatState", "reference_attention", "smat_attention", "smat_attention_at"]
