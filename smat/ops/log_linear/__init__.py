"""Log-linear attention with scalar decay and with delta-rule transitions."""

from smat.ops.log_linear.log_linear import (
    LogLinearState,
    log_linear_attention,
    log_linear_delta_rule,
    log_linear_step,
)

__all__ = ["LogLinearState", "log_linear_attention", "log_linear_delta_rule", "log_linear_step"]
