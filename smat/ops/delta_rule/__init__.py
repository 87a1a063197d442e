"""The gated delta rule, and keys and queries carried by its transitions."""

from smat.ops.delta_rule.delta_rule import (
    delta_rule,
    delta_rule_step,
    transport_keys,
    transport_queries,
)

__all__ = ["delta_rule", "delta_rule_step", "transport_keys", "transport_queries"]
