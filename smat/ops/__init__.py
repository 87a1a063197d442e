"""Operations on features and values; none owns a parameter."""

from smat.ops.smat import SMatState, reference_attention, smat_attention, smat_attention_at

__all__ = ["SMatState", "reference_attention", "smat_attention", "smat_attention_at"]
