"""The paper's tables as runs that can be made, interrupted and resumed."""
