"""Routing: who writes to which profile and who reads which types."""
