"""Benchmarks: each checks before it times, and times everything that it compares in one process."""
