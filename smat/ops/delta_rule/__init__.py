"""The gated delta rule, and keys and queries carried by its transitions."""

from smat.ops.delta_rule.delta_rule import delta_rule, delta_rule_step
from smat.ops.delta_rule.reference import (
    delta_rule_reference,
    transition_reference,
    transport_keys_reference,
    transport_queries_reference,
)
from smat.ops.delta_rule.transport import transport_keys, transport_queries

__all__ = [
    "delta_rule",
    "delta_rule_reference",
    "delta_rule_step",
    "transition_reference",
    "transport_keys",
    "transport_keys_reference",
    "transport_queries",
    "transport_queries_reference",
]
